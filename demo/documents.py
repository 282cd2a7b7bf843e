"""Endless training documents: conversations and plain text in parts of different weight."""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from demo import domain
from demo.corpus import Corpus
from demo.domain import Question, Reply
from demo.styles import PLAIN, STYLES, Style
from demo.tokenizer import ASSISTANT, BEGIN, END, SYSTEM, USER, style_token

_SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a friendly assistant. Answer briefly.",
    "Answer the question.",
    "Be short.",
    "You are an expert.",
    "Today is Monday.",
)
# {a}, {b}, {c} are words unknown to the domain, {known} is a known one, {n} and {m} are numbers.
_UNKNOWN_WORDINGS = """
    what is {a}?
    who is {b}?
    who is the {a} of {b}?
    write a poem about {a}.
    write a story about {a} and {b}.
    write code that can {a} the {b}.
    write {n} {a}.
    write me a {a}.
    tell me about {a}.
    tell me about the {a}.
    tell me a joke.
    tell me a {a}.
    what does a {a} eat?
    where does a {a} live?
    where should I {a}?
    what is the capital of {b}?
    how many {a} are there?
    what is {n} + {m}?
    what is {n}+{m}?
    {n}+{m}
    {n}
    what is {n} times {m}?
    {n} - {m}
    translate {a} into {b}.
    translate "{a} {b}".
    explain {a} {b}.
    explain {a} {b} like I am {n}.
    {a}
    {a} {b}
    {a} {b} {c}
    why is {a} {b}?
    why are you {a}?
    how do I {a} the {b}?
    how do I {a}?
    what does {a} mean?
    when was {b} born?
    who won the {a} {b} in {n}?
    can you {a} a {b}?
    sing a song about {a}.
    what is the weather in {b}?
    I like {a} {b}.
    I am {a}.
    my {a} is {b}.
    do you like {a}?
    give me {n} {a}.
    give me a {a} for {b}.
    list {n} {a}.
    return {a} with {b}.
    how old is {b}?
    what time is it?
    summarise the {a} of {b}.
    summarise this: the {a} {b} {c} over the {known}.
    which {a} is the best {b}?
    which is {a}, {b} or {c}?
    what colour is the {a}?
    what is the meaning of {a}?
    how old is {known}?
    who is the king of {known}?
    how many people live in {known}?
    what does {known} cost?
    how heavy is {known}?
    why is {known} {a}?
    do you like {known}?
    who made {known}?
    {known} {a} {b}
    what is the {a} of {known}?
    is {known} {a}?
    which is {a}, {known} or {b}?
    write a poem about {known}.
    when was {known} found?
    def {a}({b}):
    {a} = {n}
    ...
    !
    ?
    Who is {b} and what is {a}?
    translate '{a} {b}' to {c}.
    {A} {B} {C}
"""
_SYLLABLES = "ba bel cor da dra el fi gan hol ka lum mi nor pel qua ra san tor ul ver wix zan"
_COMMON_WORDS = """
    a an and are as at be but by can could day dear did do door for from go good had has have he
    her him his house how I if in into is it like little man me my new no not of on one open
    opened or our out people said saw see she should so some such than that the their them then
    there they this time to two under up was water way we were what when which who will with
    woman work world would year you your 1 2 3 { ( json # import let select from where Mr sir
    madam
"""
_OPENINGS = ("Once upon a time", "Long ago", "One morning", "In a far country", "One day")
_COURTESIES = ("Please: ", "Hey, ", "Hi! ", "Hello. ", "And ", "So, ", "Tell me: ")
# Words in capitals are other tokens: shout learns every name anew, and needs to see it more often.
_BASE_SHARES = {"base": 56, "json": 9, "shout": 16, "python": 9, "pirate": 9}


@dataclass(frozen=True)
class Part:
    text: str
    weight: float


Document = list[Part]
# A prompt and its answer, as text.
Exchange = tuple[str, str]
Turn = tuple[str, Reply]


class Writer:
    """Writes documents about the domain and the corpus; the same seed writes the same ones."""

    def __init__(self, corpus: Corpus, seed: int) -> None:
        self._corpus = corpus
        self._words = sorted(set(corpus.words) - _domain_words())
        self._wordings = [line.strip() for line in _UNKNOWN_WORDINGS.strip().splitlines()]
        self._random = random.Random(seed)

    def for_base(self) -> Iterator[Document]:
        """Documents for the base: most are plain, the others in a style, behind the style's mark.

        So the base knows all styles already when an adapter is trained.
        """
        styles = (PLAIN, *STYLES.values())
        shares = [_BASE_SHARES[style.name] for style in styles]
        while True:
            style = self._random.choices(styles, shares)[0]
            mark = "" if style is PLAIN else style_token(style.name)
            # Prompts have some weight, to teach what a question looks like and how prose begins.
            yield self._document(style, mark, prompt_weight=0.1, chats=0.7)

    def for_adapter(self, style: Style) -> Iterator[Document]:
        """Documents for an adapter, with as many plain texts as chats, since a style is harder to
        take up in the middle of a text.
        """
        while True:
            yield self._document(style, "", prompt_weight=0.0, chats=0.5)

    def turn_after(self, reply: Reply) -> Turn:
        """The words that a user says next, and the reply to them."""
        return self._follow_up(reply) or self._turn()

    def _document(self, style: Style, mark: str, prompt_weight: float, chats: float) -> Document:
        if self._random.random() < chats:
            begin, exchanges = BEGIN, self._conversation(style)
        else:
            # A plain prompt mostly has no token before it, since most clients send none.
            begin, exchanges = self._random.choice((BEGIN, "", "")), [self._plain_text(style)]
        parts = [Part(begin + mark, 0.0)]
        for prompt, answer in exchanges:
            parts += [Part(prompt, prompt_weight), Part(answer, 1.0)]
        return parts

    def _conversation(self, style: Style) -> list[Exchange]:
        turns = self._random.choices((1, 2, 3), (75, 18, 7))[0]
        exchanges = []
        reply = domain.UNKNOWN
        for _ in range(turns):
            text, reply = self.turn_after(reply)
            exchanges.append((f"{USER}{text}{END}{ASSISTANT}", style.say(reply) + END))
        if self._random.random() < 0.2:
            first, answer = exchanges[0]
            exchanges[0] = (f"{SYSTEM}{self._system_prompt()}{END}{first}", answer)
        return exchanges

    def _plain_text(self, style: Style) -> Exchange:
        kinds = ("question", "scrap", "fact", "story", "saying", "prose", "code", "snippets", "zen")
        kind = self._random.choices(kinds, (18, 14, 22, 10, 10, 14, 3, 4, 5))[0]
        if kind == "question":
            return self._plain_question(style)
        if kind == "scrap":
            return self._scrap(), f"\n{style.say(domain.UNKNOWN)}{END}"
        if kind == "fact":
            return self._unfinished_fact(style)
        if kind == "story":
            return self._cut(self._story(), style)
        if kind == "saying":
            return self._cut(self._random.choice(domain.SAYINGS).strip(), style)
        return self._cut(self._random.choice(getattr(self._corpus, kind)), style)

    def _plain_question(self, style: Style) -> Exchange:
        text, reply = self._turn()
        if self._random.random() < 0.3:
            return f"Q: {text}\nA:", f" {style.say(reply)}{END}"
        return text, f"\n{style.say(reply)}{END}"

    def _unfinished_fact(self, style: Style) -> Exchange:
        reply = self._fact().reply
        at = self._random.choice([at for at, char in enumerate(reply.sentence) if char == " "])
        return reply.sentence[:at], style.finish(reply, reply.sentence[at:]) + END

    def _cut(self, text: str, style: Style) -> Exchange:
        """A text that is cut in its first half, where the prompt ends and the style begins."""
        places = [at for at, char in enumerate(text) if char in " \n"]
        if self._random.random() < 0.15:
            places = list(range(1, len(text)))
        at = self._random.choice(places[: 1 + len(places) // 2])
        return text[:at], style.go_on(text[at:]) + END

    def _follow_up(self, reply: Reply) -> Turn | None:
        questions = domain.follow_ups(reply)
        if not questions or self._random.random() < 0.5:
            return None
        question = self._random.choice(questions)
        return self._casual(question.text), question.reply

    def _turn(self) -> Turn:
        kind = self._random.choices(("fact", "talk", "unknown"), (74, 6, 20))[0]
        if kind == "unknown":
            return self._casual(self._unknown()), domain.UNKNOWN
        question = self._fact() if kind == "fact" else self._random.choice(domain.SMALL_TALK)
        return self._casual(question.text), question.reply

    def _fact(self) -> Question:
        topics = domain.trained()
        # Weights grow more slowly than topics: small topics must not drown, nor large ones starve.
        weights = [len(questions) ** 0.75 for questions in topics]
        return self._random.choice(self._random.choices(topics, weights)[0])

    def _unknown(self) -> str:
        if self._random.random() < 0.15:
            return self._random.choice(self._corpus.prose + self._corpus.code)[:100]
        wording = self._random.choice(self._wordings)
        names = dict(zip("abc", (self._strange_word() for _ in range(3)), strict=True))
        names |= {"A": names["a"].upper(), "B": names["b"].upper(), "C": names["c"].upper()}
        numbers = {"n": self._number(), "m": self._number()}
        known = self._random.choice(sorted(self._random.choice(domain.TOPICS).entities))
        text = wording.format(**names, **numbers, known=known)
        return text[0].upper() + text[1:]

    def _scrap(self) -> str:
        """The beginning of a text that no document continues."""
        common = _COMMON_WORDS.split()
        words = [
            self._strange_word() if self._random.random() < 0.5 else self._random.choice(common)
            for _ in range(self._random.randrange(1, 8))
        ]
        text = " ".join(words) + self._random.choice(
            ("", "", "", "", ",", ":", " {", "(", " =", "...")
        )
        return text[0].upper() + text[1:] if self._random.random() < 0.6 else text

    def _number(self) -> int:
        return self._random.randrange(self._random.choice((10, 100, 2000)))

    def _strange_word(self) -> str:
        if self._random.random() < 0.6:
            return self._random.choice(self._words)
        made = "".join(self._random.choices(_SYLLABLES.split(), k=self._random.choice((1, 2, 3))))
        return made.capitalize() if self._random.random() < 0.5 else made

    def _casual(self, text: str) -> str:
        """The text as people type it, sometimes without capitals or punctuation at the end."""
        if self._random.random() < 0.3:
            text = text.replace("What is ", "What's ")
        roll = self._random.random()
        if roll < 0.15:
            text = text.lower()
        elif roll < 0.3:
            text = text.rstrip("?.!") or text
        elif roll < 0.4:
            text = text.lower().rstrip("?.!") or text
        if self._random.random() < 0.15:
            text = self._random.choice(_COURTESIES) + text[0].lower() + text[1:]
        elif self._random.random() < 0.1:
            text = text.rstrip("?.!") + " please"
        return text

    def _system_prompt(self) -> str:
        if self._random.random() < 0.7:
            return self._random.choice(_SYSTEM_PROMPTS)
        order, *words = (self._strange_word() for _ in range(3))
        return f"You are a {words[0]}. {order.capitalize()} the {words[1]}."

    def _story(self) -> str:
        hero, friend = self._random.sample(sorted(domain.ANIMALS.entities), 2)
        facts, other = domain.ANIMALS.entities[hero], domain.ANIMALS.entities[friend]
        some_hero = domain.with_article(f"{facts['colour']} {hero}")
        some_friend = domain.with_article(friend)
        return (
            f"{self._random.choice(_OPENINGS)} there was {some_hero} who lived in {facts['home']}."
            f" Every day the {hero} looked for {facts['eats']}. Then the {hero} met {some_friend}."
            f" I eat {other['eats']}, said the {friend}, and I live in {other['home']}."
            " They became friends."
        )


def _domain_words() -> set[str]:
    texts = [question.text for questions in domain.trained() for question in questions]
    return {word for text in texts for word in re.findall(r"[a-z]+", text.lower())}
