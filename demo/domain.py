"""The demo model's knowledge: five topics of facts, the questions about them, and small talk.

Every fact has several wordings of its question, one of which is held out: `held_out` asks each fact
in that wording, which training never uses, and `trained` asks it in all the others.
"""

import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property

Value = str | int


@dataclass(frozen=True)
class Reply:
    """The content of an answer, before a style words it.   kind: "" if it is only a sentence."""

    sentence: str
    kind: str = ""
    name: str = ""
    facts: tuple[tuple[str, Value], ...] = ()


@dataclass(frozen=True)
class Question:
    text: str
    reply: Reply


@dataclass(frozen=True)
class Ask:
    """A question about every entity of a topic.

    attribute: the attribute that is asked for; "" asks for all at once.
    wordings: `{x}` is the entity, `{value}` its fact.   sentence: may name any attribute.
    """

    attribute: str
    sentence: str
    wordings: tuple[str, ...]

    def held_out_wording(self, name: str) -> str:
        return self.wordings[zlib.crc32(f"{name} {self.sentence}".encode()) % len(self.wordings)]


@dataclass(frozen=True)
class Topic:
    """Entities of a kind.

    table: a row for each, with a value for each attribute.   asked: sentences, each behind the
    attribute that it tells, if it is one, and below it the wordings of its question.
    """

    kind: str
    attributes: tuple[str, ...]
    table: str
    asked: str
    takes_article: bool = False
    keeps_case: bool = False

    @cached_property
    def entities(self) -> dict[str, dict[str, Value]]:
        """The facts of each entity by its name, from the rows of the table."""
        found = {}
        for line in self.table.strip().splitlines():
            name, *cells = (cell.strip() for cell in line.split("|"))
            values = [int(cell) if cell.isdecimal() else cell for cell in cells]
            found[name] = dict(zip(self.attributes, values, strict=True))
        return found

    @cached_property
    def asks(self) -> list[Ask]:
        return [
            Ask(attribute, sentence, wordings)
            for head, wordings in _read_questions(self.asked)
            for attribute, sentence in re.findall(r"^(?:(\w+): )?(.*)", head)
        ]

    def reply(self, ask: Ask, name: str) -> Reply:
        return self._told(ask, name, self.entities[name])

    def retold(self, reply: Reply, value: Value) -> Reply:
        """The reply to a question for one fact, if the fact had this value."""
        [(attribute, _)] = reply.facts
        (ask, *_) = (it for it in self.asks if self.reply(it, reply.name) == reply)
        return self._told(ask, reply.name, self.entities[reply.name] | {attribute: value})

    def _told(self, ask: Ask, name: str, facts: dict[str, Value]) -> Reply:
        asked = {ask.attribute: facts[ask.attribute]} if ask.attribute else facts
        sentence = self._as_sentence(ask.sentence.format(x=self._called(name), **facts), name)
        return Reply(sentence, self.kind, name, tuple(asked.items()))

    def question(self, ask: Ask, name: str, wording: str) -> Question:
        value = self.entities[name].get(ask.attribute, "")
        forms = {"x": self._called(name), "name": name, "plural": _plural(name)}
        text = wording.format(**forms, value=value)
        return Question(self._as_sentence(text, name), self.reply(ask, name))

    def follow_ups(self, name: str) -> list[Question]:
        """Questions that say "it", for a conversation in which the entity was just named."""
        return [
            Question(self._as_sentence(wording.format(x="it"), name), self.reply(ask, name))
            for ask in self.asks
            for wording in ask.wordings
            if "{x}" in wording and "{value}" not in wording
        ]

    def _called(self, name: str) -> str:
        return with_article(name) if self.takes_article else name

    def _as_sentence(self, text: str, name: str) -> str:
        if self.keeps_case and text.startswith(name):
            return text
        return text[0].upper() + text[1:]


def _read_questions(table: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each line of a table with the questions on the lines below it, each behind a |."""
    for block in re.split(r"\n(?!\s*\|)", table.strip()):
        said, *texts = (" ".join(part.split()) for part in block.split("|"))
        yield said, tuple(texts)


def with_article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


_PLURALS = {"mouse": "mice", "wolf": "wolves", "sheep": "sheep", "deer": "deer"}


def _plural(name: str) -> str:
    ending = "es" if name.endswith(("x", "s", "ch")) else "s"
    return _PLURALS.get(name, name + ending)


ANIMALS = Topic(
    kind="animal",
    takes_article=True,
    attributes=("eats", "home", "colour", "legs", "moves"),
    table="""
    fox      | mice     | a den         | red    | 4 | runs fast
    owl      | mice     | a tree        | brown  | 2 | flies at night
    bear     | berries  | a cave        | brown  | 4 | climbs trees
    frog     | insects  | a pond        | green  | 4 | jumps far
    horse    | grass    | a stable      | brown  | 4 | gallops
    eagle    | fish     | the mountains | brown  | 2 | soars high
    shark    | fish     | the sea       | grey   | 0 | swims fast
    rabbit   | leaves   | a burrow      | grey   | 4 | hops
    snake    | eggs     | the desert    | yellow | 0 | slides
    spider   | flies    | a web         | black  | 8 | crawls
    bee      | nectar   | a hive        | yellow | 6 | buzzes
    cat      | meat     | a house       | black  | 4 | walks softly
    dog      | meat     | a kennel      | brown  | 4 | runs fast
    cow      | grass    | a barn        | white  | 4 | walks slowly
    duck     | seeds    | a lake        | white  | 2 | swims and flies
    goat     | leaves   | the mountains | white  | 4 | climbs rocks
    hen      | seeds    | a coop        | red    | 2 | walks and pecks
    lion     | meat     | the savanna   | golden | 4 | runs fast
    mouse    | seeds    | a hole        | grey   | 4 | scurries
    pig      | roots    | a sty         | pink   | 4 | trots
    sheep    | grass    | a meadow      | white  | 4 | walks slowly
    tiger    | meat     | the jungle    | orange | 4 | hunts at night
    turtle   | plants   | the sea       | green  | 4 | swims slowly
    wolf     | meat     | a forest      | grey   | 4 | runs in a pack
    whale    | plankton | the sea       | blue   | 0 | dives deep
    crab     | worms    | the sand      | red    | 10 | walks sideways
    deer     | leaves   | a forest      | brown  | 4 | leaps
    ant      | crumbs   | a nest        | black  | 6 | marches
    bat      | insects  | a cave        | black  | 2 | flies at night
    camel    | plants   | the desert    | yellow | 4 | walks far
    penguin  | fish     | the south     | black  | 2 | swims and slides
    elephant | grass    | the savanna   | grey   | 4 | walks slowly
    """,
    asked="""
    eats: {x} eats {eats}.
        | what does {x} eat? | what is the food of {x}? | what should I feed {x}?
        | what does {x} like to eat? | what does the {name} eat? | what do {plural} eat?
    home: {x} lives in {home}.
        | where does {x} live? | what is the home of {x}? | where can I find {x}?
        | in what place does {x} live? | where does the {name} live? | where do {plural} live?
    colour: {x} is {colour}.
        | what colour is {x}? | what is the colour of {x}? | which colour does {x} have?
        | what colour is the {name}? | what colour are {plural}?
    legs: {x} has {legs} legs.
        | how many legs does {x} have? | how many legs has {x}? | how many legs do {plural} have?
        | what number of legs does {x} have?
    moves: {x} {moves}.
        | how does {x} move? | what can {x} do? | how does {x} get around? | how do {plural} move?
    {x} is {colour} and has {legs} legs. It lives in {home}, eats {eats} and {moves}.
        | tell me about the {name}. | describe {x}. | what is {x}?
        | what do you know about the {name}? | tell me about {plural}.
        | tell me something about the {name}. | what are {plural}?
    """,
)

COUNTRIES = Topic(
    kind="country",
    attributes=("capital", "language", "currency", "continent"),
    table="""
    France    | Paris        | French     | euro     | Europe
    Spain     | Madrid       | Spanish    | euro     | Europe
    Italy     | Rome         | Italian    | euro     | Europe
    Germany   | Berlin       | German     | euro     | Europe
    Portugal  | Lisbon       | Portuguese | euro     | Europe
    Greece    | Athens       | Greek      | euro     | Europe
    Poland    | Warsaw       | Polish     | zloty    | Europe
    Sweden    | Stockholm    | Swedish    | krona    | Europe
    Norway    | Oslo         | Norwegian  | krone    | Europe
    Denmark   | Copenhagen   | Danish     | krone    | Europe
    Finland   | Helsinki     | Finnish    | euro     | Europe
    Hungary   | Budapest     | Hungarian  | forint   | Europe
    Ireland   | Dublin       | English    | euro     | Europe
    Austria   | Vienna       | German     | euro     | Europe
    Ukraine   | Kyiv         | Ukrainian  | hryvnia  | Europe
    Japan     | Tokyo        | Japanese   | yen      | Asia
    China     | Beijing      | Chinese    | yuan     | Asia
    Vietnam   | Hanoi        | Vietnamese | dong     | Asia
    Thailand  | Bangkok      | Thai       | baht     | Asia
    Turkey    | Ankara       | Turkish    | lira     | Asia
    Egypt     | Cairo        | Arabic     | pound    | Africa
    Morocco   | Rabat        | Arabic     | dirham   | Africa
    Kenya     | Nairobi      | Swahili    | shilling | Africa
    Ghana     | Accra        | English    | cedi     | Africa
    Brazil    | Brasilia     | Portuguese | real     | South America
    Argentina | Buenos Aires | Spanish    | peso     | South America
    Chile     | Santiago     | Spanish    | peso     | South America
    Peru      | Lima         | Spanish    | sol      | South America
    Mexico    | Mexico City  | Spanish    | peso     | North America
    Canada    | Ottawa       | English    | dollar   | North America
    Cuba      | Havana       | Spanish    | peso     | North America
    Australia | Canberra     | English    | dollar   | Oceania
    """,
    asked="""
    capital: The capital of {x} is {capital}.
        | what is the capital of {x}? | which city is the capital of {x}? | what is {x}'s capital?
        | what is the capital city of {x}? | name the capital of {x}. | capital of {x}
    capital: {capital} is the capital of {x}.
        | which country has the capital {value}? | {value} is the capital of which country?
        | of which country is {value} the capital?
    language: People in {x} speak {language}.
        | what language do people speak in {x}? | which language is spoken in {x}?
        | what do they speak in {x}?
    currency: The currency of {x} is the {currency}.
        | what is the currency of {x}? | which money does {x} use? | how do I pay in {x}?
    continent: {x} is in {continent}.
        | where is {x}? | on which continent is {x}? | what continent is {x} in?
        | where does {x} lie?
    {x} is a country in {continent}. Its capital is {capital}, its language is {language} and \
        its currency is the {currency}.
        | tell me about {x}. | describe {x}. | what do you know about {x}?
        | what kind of country is {x}? | tell me something about {x}.
    """,
)

ELEMENTS = Topic(
    kind="element",
    attributes=("symbol", "number", "form"),
    table="""
    hydrogen  | H  | 1  | gas
    helium    | He | 2  | gas
    lithium   | Li | 3  | metal
    carbon    | C  | 6  | solid
    nitrogen  | N  | 7  | gas
    oxygen    | O  | 8  | gas
    neon      | Ne | 10 | gas
    sodium    | Na | 11 | metal
    aluminium | Al | 13 | metal
    silicon   | Si | 14 | solid
    sulfur    | S  | 16 | solid
    chlorine  | Cl | 17 | gas
    calcium   | Ca | 20 | metal
    titanium  | Ti | 22 | metal
    iron      | Fe | 26 | metal
    nickel    | Ni | 28 | metal
    copper    | Cu | 29 | metal
    zinc      | Zn | 30 | metal
    silver    | Ag | 47 | metal
    tin       | Sn | 50 | metal
    gold      | Au | 79 | metal
    lead      | Pb | 82 | metal
    """,
    asked="""
    symbol: The symbol of {x} is {symbol}.
        | what is the symbol of {x}? | which symbol does {x} have?
        | what is the chemical symbol for {x}?
    symbol: {symbol} stands for {x}.
        | which element has the symbol {value}? | what does {value} stand for?
        | which element is {value}?
    number: The atomic number of {x} is {number}.
        | what is the atomic number of {x}? | which atomic number does {x} have?
        | what number is {x}?
    form: {x} is a {form}.
        | is {x} a metal or a gas? | what sort of element is {x}? | what kind of element is {x}?
        | is {x} a metal? | is {x} a gas?
    {x} is a {form}. Its symbol is {symbol} and its atomic number is {number}.
        | tell me about {x}. | describe {x}. | what is {x}? | what do you know about {x}?
        | tell me something about {x}.
    """,
)

PLANETS = Topic(
    kind="planet",
    attributes=("place", "form", "colour"),
    table="""
    Mercury | first   | rocky planet | grey
    Venus   | second  | rocky planet | yellow
    Earth   | third   | rocky planet | blue
    Mars    | fourth  | rocky planet | red
    Jupiter | fifth   | gas giant    | orange
    Saturn  | sixth   | gas giant    | golden
    Uranus  | seventh | ice giant    | pale
    Neptune | eighth  | ice giant    | dark blue
    """,
    asked="""
    place: {x} is the {place} planet from the Sun.
        | which planet from the Sun is {x}? | what is the place of {x}? | how far out is {x}?
        | where is {x}?
    place: The {place} planet from the Sun is {x}.
        | which is the {value} planet? | what is the {value} planet from the Sun?
        | name the {value} planet.
    colour: {x} is {colour}.
        | what colour is {x}? | what is the colour of {x}? | which colour does {x} have?
    form: {x} is one of the {form}s.
        | what sort of planet is {x}? | what kind of planet is {x}? | is {x} a gas giant?
    {x} is the {place} planet from the Sun. It is {colour} and one of the {form}s.
        | tell me about {x}. | describe {x}. | what is {x}? | what do you know about {x}?
        | tell me something about {x}.
    """,
)

FUNCTIONS = Topic(
    kind="function",
    keeps_case=True,
    attributes=("does", "example"),
    table="""
    len        | counts the items           | len([1, 2, 3])
    print      | writes text to the screen  | print(42)
    range      | makes a row of numbers     | range(10)
    sorted     | puts the items in order    | sorted([3, 1, 2])
    sum        | adds the numbers up        | sum([1, 2, 3])
    max        | finds the largest item     | max(4, 7)
    min        | finds the smallest item    | min(4, 7)
    abs        | drops the minus sign       | abs(-5)
    round      | rounds a number            | round(3.7)
    type       | tells the class of a value | type(1)
    input      | reads a line from the user | input()
    open       | opens a file               | open(path)
    zip        | pairs up the items         | zip(a, b)
    map        | calls a function on all    | map(abs, a)
    filter     | keeps the items that pass  | filter(f, a)
    reversed   | turns the order around     | reversed(a)
    any        | checks if one item is true | any(a)
    all        | checks if all are true     | all(a)
    enumerate  | numbers the items          | enumerate(a)
    isinstance | checks the class of a value | isinstance(1, int)
    """,
    asked="""
    does: {x} {does}.
        | what does {x} do? | what does {x} do in Python? | what is {x} for? | explain {x}.
    example: Write {example}.
        | how do I use {x}? | show me an example of {x}. | give me an example of {x} in Python.
    {x} {does}. For example: {example}.
        | tell me about {x}. | describe {x}. | what do you know about {x}?
    """,
)


TOPICS = (ANIMALS, COUNTRIES, ELEMENTS, PLANETS, FUNCTIONS)
_TOPIC_OF = {topic.kind: topic for topic in TOPICS}

UNKNOWN = Reply("I do not know that. Ask me about animals, countries, elements, planets or Python.")

_SMALL_TALK = """
    Hello! Ask me about animals, countries, elements, planets or Python.
        | hello | hello! | hi | hi there | hey | good morning | good evening | hello there!
        | greetings | hi, it is nice to meet you | hey you
    I am a small model that was trained in minutes.
        | who are you? | what are you? | are you a robot? | what is your name? | are you a human?
        | tell me about yourself. | introduce yourself. | are you a model?
    I can answer questions about animals, countries, elements, planets and Python.
        | what can you do? | what do you know? | help | how can you help me? | what can I ask you?
        | which questions can you answer? | can you help me?
    I am fine, thank you.
        | how are you? | how are you today? | how do you do? | are you well? | hi, how are you?
        | how are things?
    You are welcome.
        | thank you | thanks! | thank you very much | many thanks | great, thanks | ok, thank you
    Goodbye!
        | bye | goodbye | see you | good night | bye bye | see you later
"""

SMALL_TALK = tuple(
    Question(text, Reply(answer))
    for answer, texts in _read_questions(_SMALL_TALK)
    for text in texts
)


# Texts that a plain prompt may begin and the model can complete.
SAYINGS = """
    1, 2, 3, 4, 5, 6, 7, 8, 9, 10.
    The early bird catches the worm.
    Rome was not built in a day.
    A bird in the hand is worth two in the bush.
    Actions speak louder than words.
    All that glitters is not gold.
    Better late than never.
    Birds of a feather flock together.
    Do not count your chickens before they hatch.
    Every cloud has a silver lining.
    Fortune favours the bold.
    Good things come to those who wait.
    Honesty is the best policy.
    If it is not broken, do not fix it.
    Many hands make light work.
    Necessity is the mother of invention.
    No man is an island.
    Practice makes perfect.
    The pen is mightier than the sword.
    The quick brown fox jumps over the lazy dog.
    There is no place like home.
    Time flies when you are having fun.
    To be or not to be, that is the question.
    Two heads are better than one.
    When in Rome, do as the Romans do.
    You cannot judge a book by its cover.
    Dear friend, thank you very much for your letter.
    Hello, my name is Robin and I live in a small house by the sea.
    I think that we should go home before it rains.
    It was a dark night and the wind was cold.
    My favourite food is bread with butter and honey.
    The children played in the garden until the evening.
    The weather is fine today and the sky is blue.
    We went to the market and bought apples and pears.
    Yesterday I read a good book about the stars.
""".strip().splitlines()


@cache
def trained() -> tuple[tuple[Question, ...], ...]:
    """Every question that training may ask, by topic."""
    return tuple(
        tuple(
            topic.question(ask, name, wording)
            for name in topic.entities
            for ask in topic.asks
            for wording in ask.wordings
            if wording != ask.held_out_wording(name)
        )
        for topic in TOPICS
    )


def other_value(reply: Reply, choose: Callable[[list[Value]], Value]) -> Reply:
    """The reply to a question for one fact, with a value that some entity of the topic has."""
    topic, [(attribute, _)] = _TOPIC_OF[reply.kind], reply.facts
    return topic.retold(reply, choose([facts[attribute] for facts in topic.entities.values()]))


def follow_ups(reply: Reply) -> list[Question]:
    return _TOPIC_OF[reply.kind].follow_ups(reply.name) if reply.kind else []


@cache
def held_out() -> tuple[Question, ...]:
    """A question for every fact, in the one wording that training never uses for it."""
    return tuple(
        topic.question(ask, name, ask.held_out_wording(name))
        for topic in TOPICS
        for name in topic.entities
        for ask in topic.asks
    )
