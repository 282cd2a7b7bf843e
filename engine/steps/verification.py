"""Verifies drafts against what the model chooses, in the same way whoever drafted them.

A token is chosen at each position as if there were no drafts: with the mask, the penalties and the
random number of that position. A draft is accepted if it is the token that was chosen, and what was
chosen behind the first other one is thrown away. So answers do not change, seeded ones included.

It is the rejection sampling of arXiv 2302.01318 for drafts that are certain of themselves: a draft
is accepted with the probability that the model gives it, and a token in place of a rejected draft
has the model's distribution without that draft.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.grammar.matcher import Mask
from engine.steps.batch import BAD_LOGITS, ScheduledRow


@dataclass(frozen=True, slots=True)
class Verdict:
    """The tokens of a step that count.

    token_ids, num_accepted: as in StepTokens.   kept: the choices that count, by row number, of
    rows that chose and did not fail; see `Choices.verify`.
    """

    token_ids: Sequence[int | None]
    num_accepted: Mapping[int, int]
    kept: Mapping[int, Sequence[int]]

    @property
    def num_chosen(self) -> int:
        """Tokens that answers get."""
        return sum(map(len, self.kept.values()))


@dataclass(frozen=True, slots=True)
class Choices:
    """Tokens to choose: one for each row that samples, and one behind each of its drafts.

    numbers: of the row, for each choice; a row's choices are adjacent, in the order of positions.
    places: which of the rows' sampled positions each choice is made at.
    rows: what each choice depends on, as a row without drafts.   masks: by choice.
    """

    numbers: Sequence[int]
    places: Sequence[int]
    rows: Sequence[ScheduledRow]
    masks: Mapping[int, Mask]

    @classmethod
    def of(cls, rows: Sequence[ScheduledRow], masks: Mapping[int, Sequence[Mask]]) -> "Choices":
        """The choices of a step. masks: by row number. A constrained row chooses as many tokens as
        it has masks.
        """
        numbers: list[int] = []
        places: list[int] = []
        single: list[ScheduledRow] = []
        mask_of: dict[int, Mask] = {}
        first = 0
        for number, row in enumerate(rows):
            if row.sampling is None:
                continue
            own = masks.get(number, ())
            count = min(1 + row.num_drafts, len(own)) if row.is_constrained else 1 + row.num_drafts
            mask_of.update(enumerate(own[:count], start=len(numbers)))
            numbers += [number] * count
            places += range(first, first + count)
            single += single_rows(row)[:count]
            first += 1 + row.num_drafts
        return cls(numbers, places, single, mask_of)

    def verify(
        self, rows: Sequence[ScheduledRow], token_ids: Sequence[int]
    ) -> dict[int, list[int]]:
        """The choices that count, by row number: those at accepted drafts, and the one behind them.

        rows: of the step.   token_ids: what was chosen. A row with BAD_LOGITS among the choices
        that count has no other that counts, as it fails.
        """
        kept: dict[int, list[int]] = {}
        for choice, (number, token_id) in enumerate(zip(self.numbers, token_ids, strict=True)):
            own = kept.setdefault(number, [])
            drafts = rows[number].draft_token_ids
            if len(own) and token_ids[own[-1]] != drafts[len(own) - 1]:
                continue  # behind a rejected draft
            if token_id == BAD_LOGITS:
                own.clear()
            own.append(choice)
        return kept

    def judge(
        self, rows: Sequence[ScheduledRow], token_ids: Sequence[int], is_finite: Sequence[bool]
    ) -> Verdict:
        """Verify what was chosen, and fail rows that have a token with values that are not finite.

        rows, token_ids: as in `verify`.   is_finite: of each token of the step. Those of rejected
        drafts are not looked at. Rows that choose nothing fail, too, since the keys and values of
        such a token must not be cached.
        """
        kept = self.verify(rows, token_ids)
        num_accepted = {number: len(own) - 1 for number, own in kept.items() if len(own) > 1}
        found: list[int | None] = []
        flags = iter(is_finite)
        for number, row in enumerate(rows):
            num_kept = len(row.token_ids) - row.num_drafts + num_accepted.get(number, 0)
            is_sound = all([next(flags) for _ in row.token_ids][:num_kept])
            chosen = token_ids[kept[number][-1]] if number in kept else None
            found.append(chosen if is_sound else BAD_LOGITS)
        good = {number: own for number, own in kept.items() if found[number] != BAD_LOGITS}
        return Verdict(found, num_accepted, good)


def single_rows(row: ScheduledRow) -> list[ScheduledRow]:
    """The rows without drafts that choose a row's tokens: the next one, then one for each draft."""
    if not row.num_drafts:
        return [row]
    return [_behind(row, i) for i in range(1 + row.num_drafts)]


def _behind(row: ScheduledRow, num_accepted: int) -> ScheduledRow:
    """The row that chooses the token after so many of this row's drafts."""
    drafts = row.draft_token_ids[:num_accepted]
    has_penalties = row.sampling is not None and row.sampling.has_penalties
    return row._replace(
        token_ids=(),
        num_drafts=0,
        num_output_tokens=row.num_output_tokens + num_accepted,
        output_token_ids=(*row.output_token_ids, *drafts) if has_penalties else (),
    )
