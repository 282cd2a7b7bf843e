"""A limit on reasoning: its end is forced, and all else of an answer is as it was."""

import json
from dataclasses import replace

import pytest

from engine.grammar.llguidance_matcher import LlguidanceGrammars
from engine.models.weights import load_config
from engine.requests.reasoning import Reasoning
from engine.wire.messages import ReasoningBudget
from server.constraints.constraint import Constraint
from server.text.tokenizer import Tokenizer
from server.tools.built_in import BUILT_IN
from server.tools.grammar import AnswerForm
from server.tools.tool import Tool, ToolUse
from tests.engine.fakes import (
    EOS,
    FakeDrafter,
    expected_tokens,
    fake_token,
    make_core,
    make_message,
    make_scheduler,
    run_until_idle,
    tokens_of,
    unbanned_token,
)
from tests.engine.gpu.backends import fake_backend
from tests.engine.real_core import build_core
from tests.engine.test_constraints import Script, make_core_of, run_slowly
from tests.engine.test_structured_output import DEMO

OPEN, CLOSING = 201, (202, 203)


def make_budget(max_tokens, is_begun=True):
    return ReasoningBudget(
        max_tokens=max_tokens, is_begun=is_begun, opens=(b"<think>", bytes([OPEN])),
        closes=(bytes(CLOSING),), opening=(OPEN,), closing=CLOSING,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("texts", "is_begun", "num_tokens", "forced", "is_open", "is_over"),
    [
        ([], True, 0, None, True, False),
        ([], False, 0, None, False, False),
        ([b"\n", b"<th"], False, 0, None, False, False),
        ([b"\n", b"<th", b"ink>\n"], False, 0, None, True, False),
        ([b"\n", b"<th", b"ink>\n", b"a", b"b"], False, 2, CLOSING[0], True, False),
        ([b"<thin", b"g"], False, 0, None, False, True),
        ([b"a <think>", b"b", b"c"], False, 0, None, False, True),
        ([b"a", b" \xca", b"\xcb "], True, 3, None, True, True),
        ([b"a", b"b\xca\xcb"], True, 2, None, True, True),
        ([b"a", b"b", b"c", b"<think>", b"d"], True, 5, CLOSING[0], True, False),
    ],
    ids=str,
)
def test_marks_are_found_in_the_text_however_tokens_divide_it(
    texts, is_begun, num_tokens, forced, is_open, is_over
):
    reasoning = Reasoning(make_budget(2, is_begun))
    for text in texts:
        reasoning.push(1, text)
    assert (reasoning.num_tokens, reasoning.forced) == (num_tokens, forced)
    assert (reasoning.is_open, reasoning.is_over) == (is_open, is_over)
    assert reasoning.banned == ((OPEN,) if is_open or is_over else ())


def test_a_mark_that_is_a_special_token_has_the_bytes_that_the_request_gives_it():
    budget = replace(make_budget(2), words=((9, bytes(CLOSING)),))
    reasoning = Reasoning(budget)
    reasoning.push(9, b"")
    assert reasoning.is_over


def expected(message, budget):
    """The tokens of an answer that is computed alone, one by one."""
    said, closing = [], list(budget.closing)
    for _ in range(message.sampling_params.max_tokens):
        blanks = next((i for i, t in enumerate(said) if bytes([t]).strip()), len(said))
        opened = said[blanks : blanks + 1] == [OPEN]
        begun_at = 0 if budget.is_begun else blanks + 1 if opened else None
        token = fake_token([*message.prompt_token_ids, *said], None)
        thought = [] if begun_at is None else said[begun_at:]
        is_closed = any(thought[i : i + len(closing)] == closing for i in range(len(thought)))
        if begun_at is not None and not is_closed and len(thought) >= budget.max_tokens:
            num_forced = next(
                n for n in reversed(range(len(closing)))
                if thought[-n or 99 :] == closing[:n] and len(thought) - n >= budget.max_tokens
            )  # fmt: skip
            token = closing[num_forced]
        elif budget.is_begun or blanks < len(said) or not budget.max_tokens:
            token = unbanned_token([OPEN], token)
        said.append(token)
    return said


LIMITS = {"plain": {}, "drafts": {"drafter": FakeDrafter(2, 0.2)}, "preemption": {"num_slabs": 9}}


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("is_begun", [True, False])
def test_the_answer_goes_on_behind_a_part_of_the_length_that_was_asked_for(
    tmp_path, lag, limits, is_begun
):
    """Tokens may be pending or drafted, and answers preempted. The first token of an answer that
    has not begun to reason is the mark that opens it.
    """
    budgets, messages = [0, 1, 9, 25, 100], []
    for number, most in enumerate(budgets):
        name, first = f"r{number}", OPEN
        prompts = (make_message(f"{name} {i}", prompt_len=9).prompt_token_ids for i in range(9999))
        if not is_begun and number:
            first = next(p for p in prompts if fake_token(p, None) == OPEN)
        else:
            first = next(prompts)
        message = make_message(
            name, prompt=first, max_tokens=40, reasoning=make_budget(most, is_begun)
        )
        messages.append(message)
    core = make_core(tmp_path, make_scheduler(**LIMITS[limits]), lag)
    for message in messages:
        core.handle("gw", message)
    outputs = run_until_idle(core)
    for message, most in zip(messages, budgets, strict=True):
        said = tokens_of(outputs[message.request_id])
        assert said == expected(message, message.sampling_params.reasoning)
        is_cut = most < 40 and (is_begun or most > 0)
        start = most + (not is_begun)
        assert (tuple(said[start : start + 2]) == CLOSING) == is_cut
        assert outputs[message.request_id][-1].num_completion_tokens == 40
    assert core.runner.meter.sampled_tokens == 40 * len(messages)
    if limits == "preemption":
        assert core.scheduler.queues.num_preemptions > 0
    if limits == "drafts":
        assert core.take_stats().drafts.accepted_tokens > 20
    free = replace(messages[2], request_id="free")
    params = replace(free.sampling_params, reasoning=None)
    core.handle("gw", replace(free, sampling_params=params))
    assert tokens_of(run_until_idle(core)["free"]) == expected_tokens(free)


def test_every_answer_to_a_prompt_thinks_for_itself(tmp_path):
    core = make_core(tmp_path)
    message = make_message(n=3, max_tokens=20, reasoning=make_budget(4))
    core.handle("gw", message)
    outputs = run_until_idle(core)["r1"]
    for index in range(3):
        said = tokens_of([output for output in outputs if output.index == index])
        assert said == expected(message, message.sampling_params.reasoning)
    assert outputs[-1].num_completion_tokens == 60


@pytest.mark.parametrize("lag", [0, 1])
def test_a_grammar_begins_behind_the_forced_end_which_waits_for_the_grammar_to_allow_it(
    tmp_path, lag
):
    """A grammar does not allow it in the middle of a character, for example."""
    anything, rest = range(1, 250), [b"x"[0]]
    script = Script(anything, anything, [7, 8], anything, anything, rest, [EOS])
    core, outputs = make_core_of(script, tmp_path, lag), {}
    core.handle("gw", make_message("r", max_tokens=50, grammar="g", reasoning=make_budget(2)))
    run_slowly(core, outputs, lambda: not core.scheduler.has_work)
    said = tokens_of(outputs["r"])
    assert said[2] in (7, 8)
    assert said[3:] == [*CLOSING, *rest, EOS]


USE = ToolUse((Tool("now", None, {}, True, "tools"),), "required", ("now",))
CONSTRAINT = Constraint("json", '{"type": "object", "properties": {"a": {"type": "integer"}}}', "s")
FORMS = {"shape": (None, CONSTRAINT), "tools": (USE, None)}


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("options", [{}, {"make_backend": fake_backend}], ids=["cpu", "device"])
def test_an_answer_thinks_as_long_as_it_may_and_then_has_its_form(tmp_path, kind, options):
    """The tokenizer is a model's own, in which a mark is several tokens."""
    tokenizer, config = Tokenizer(DEMO), load_config(DEMO)
    eos, template = config["eos_token_id"], BUILT_IN["hermes"]
    closing = tuple(tokenizer.encode("</think>", add_special_tokens=False))
    assert len(closing) > 1
    grammars = LlguidanceGrammars(DEMO / "tokenizer.json", config["vocab_size"], [eos])
    tokens = list(tokenizer.vocabulary), [eos], grammars
    core = build_core(DEMO, tmp_path / "core", {}, tokens=tokens, **options)
    grammar = AnswerForm(template, *FORMS[kind], {}, True).compiled().text
    prompt = tokenizer.encode("What is a fox?")
    budget = ReasoningBudget(
        max_tokens=6, is_begun=True, opens=(b"<think>",), closes=(b"</think>",), opening=(),
        closing=closing,
    )  # fmt: skip
    for number in range(6):
        message = make_message(
            f"r{number}", 9, 120, prompt=prompt, grammar=grammar, reasoning=budget
        )
        params = replace(
            message.sampling_params,
            temperature=0.8,
            seed=number,
            logprobs=0,
            logit_bias=((eos, 100.0),),
        )
        core.handle("gw", replace(message, sampling_params=params))
    num_ended = 0
    for outputs in run_until_idle(core, 10**6).values():
        said = tokens_of(outputs)
        assert said[6 : 6 + len(closing)] == list(closing)
        assert sum(len(output.logprobs or ()) for output in outputs) == len(said)
        text = b"".join(tokenizer.vocabulary[i] for i in said[6 + len(closing) :]).decode()
        if outputs[-1].stop_cause == "eos":
            num_ended += 1
            body = text.strip().removeprefix("<tool_call>").removesuffix("</tool_call>")
            json.loads(body)
    assert num_ended > 0
