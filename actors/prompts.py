"""Ordinal -> Prompt, a pure function of (seed, ordinal): resuming a run needs one integer and no loader state.

files          ordinal = epoch * n + position; every epoch visits the n training rows once, in its own order
reasoning_gym  ordinal = index in an endless stream of fresh questions
held-out rows  chosen by content, not by place or seed: the same file gives the same evaluation in every run,
               and no question (nor a duplicate of it) is ever on both sides

source = PromptSource.open(config.prompts, config.model, config.run.seed, config.sampling.max_tokens)
source.check()            ConfigError before anything heavy starts
source.prompt_for(17)     Prompt(ordinal=17, text="sorted([3, 1, 2]) =", token_ids=int32[11], meta={"answer": ...})
source.held_out()         [Prompt(ordinal=-1, ...), Prompt(ordinal=-2, ...), ...]
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from actors.config import ModelConfig, PromptsConfig
from actors.models import check_model_dir, load_tokenizer
from actors.prompt_files import Row, read_rows
from actors.reasoning_tasks import DEFAULT_TEMPLATE, ReasoningTask
from rollout.errors import ConfigError
from rollout.types import Int32, Prompt

HELD_OUT_STREAM = -1  # reasoning_gym stream of the held-out questions; runs use seeds >= 0
SHOTS_STREAM = -2
ENDLESS_CHECKED = 256  # questions of an endless stream that check() looks at
REDRAWS = 1000


class Rows(Protocol):
    """Where training rows come from."""

    held_out: list[Row]

    def at(self, ordinal: int) -> Row: ...

    def to_check(self) -> Iterable[Row]: ...


@dataclass(frozen=True, slots=True)
class PromptReport:
    """What check() found: PromptReport(training_rows=936, held_out=64, longest=46, dropped=0); rows 0 = endless."""

    training_rows: int
    held_out: int
    longest: int
    dropped: int


class PromptSource:
    """All prompts of a run. `max_prompt_tokens` is the context minus the answer's budget, None for no limit."""

    def __init__(
        self, config: PromptsConfig, tokenizer: Any, seed: int, *, max_prompt_tokens: int | None = None
    ) -> None:
        self.config, self.tokenizer, self.seed = config, tokenizer, seed
        self.max_prompt_tokens = max_prompt_tokens
        self._shots = self._solved_examples() if config.shots else ""
        self._dropped = 0
        self._rows: Rows
        if config.source == "reasoning_gym":
            self._rows = _TaskRows(config, seed, self._short_enough)
        else:
            training = self._read(config.path)
            held_out = self._read(config.held_out_path) if config.held_out_path else None
            self._rows = _FileRows(config, training, held_out, seed)

    @classmethod
    def open(cls, config: PromptsConfig, model: ModelConfig, seed: int, max_tokens: int = 0) -> PromptSource:
        """The source for a model directory; prompts must leave room for `max_tokens` in its context."""
        facts = check_model_dir(model.path)
        context = min(facts.context, model.max_context or facts.context)
        return cls(config, load_tokenizer(model.path), seed, max_prompt_tokens=context - max_tokens)

    def decode(self, token_ids: Sequence[int] | Int32, stop: Sequence[str] = ()) -> str:
        """What rewards see of an answer: its text up to the first stop string, without special tokens."""
        return answer_text(self.tokenizer, token_ids, stop)

    def prompt_for(self, ordinal: int) -> Prompt:
        """Raises ConfigError if this very prompt leaves no room for an answer (endless sources: check() samples)."""
        if ordinal < 0:
            raise ValueError(f"ordinal {ordinal} is negative; held-out prompts come from held_out()")
        return self._prompt(ordinal, self._rows.at(ordinal))

    def held_out(self) -> list[Prompt]:
        """Prompts that are never trained on, numbered -1, -2, ..."""
        return [self._prompt(-1 - i, row) for i, row in enumerate(self._rows.held_out)]

    def check(self) -> PromptReport:
        """Render and measure every row (of an endless stream, the first few hundred). Raises ConfigError."""
        rows = [*self._rows.to_check(), *self._rows.held_out]
        longest = 0
        for row, length in self._lengths(rows):
            self._refuse_too_long(row, length)
            longest = max(longest, length)
        n = self._rows.n if isinstance(self._rows, _FileRows) else 0
        return PromptReport(n, len(self._rows.held_out), longest, self._dropped)

    # ---- rendering --------------------------------------------------------------------------------------------

    def _prompt(self, ordinal: int, row: Row) -> Prompt:
        text, special = self._render(row)
        token_ids = np.asarray(self.tokenizer(text, add_special_tokens=special)["input_ids"], dtype=np.int32)
        self._refuse_too_long(row, len(token_ids))
        return Prompt(ordinal, text, token_ids, row.meta)

    def _render(self, row: Row) -> tuple[str, bool]:
        """The text the model sees, and whether the tokenizer still has to add its special tokens."""
        if row.messages is None:
            assert row.text is not None
            template = self.config.template or (DEFAULT_TEMPLATE if self._shots else None)
            text = self._shots + (template.replace("{prompt}", row.text) if template else row.text)
            if not self.config.chat:
                return text, True
            messages: list[Any] = [{"role": "user", "content": text}]
            if self.config.system is not None:
                messages.insert(0, {"role": "system", "content": self.config.system})
        else:
            messages = list(row.messages)
        if not getattr(self.tokenizer, "chat_template", None):
            raise ConfigError(
                f"{row.place} is a chat, but the model's tokenizer has no chat template; "
                "use plain prompts or another model"
            )
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True), False

    def _solved_examples(self) -> str:
        """The same solved questions in front of every question, so that the engine computes them once."""
        assert self.config.task is not None
        stream = ReasoningTask(self.config.task, self.config.args, SHOTS_STREAM)
        template = self.config.template or DEFAULT_TEMPLATE
        rows = [stream.row(i) for i in range(self.config.shots)]
        return "".join(f"{template.replace('{prompt}', row.text or '')} {row.meta['answer']}\n\n" for row in rows)

    # ---- lengths ----------------------------------------------------------------------------------------------

    def _lengths(self, rows: Sequence[Row]) -> Iterator[tuple[Row, int]]:
        for start in range(0, len(rows), 1024):
            chunk = rows[start : start + 1024]
            rendered = [self._render(row) for row in chunk]
            for special in (True, False):
                batch = [(row, text) for row, (text, flag) in zip(chunk, rendered, strict=True) if flag is special]
                if batch:
                    ids = self.tokenizer([text for _, text in batch], add_special_tokens=special)["input_ids"]
                    yield from ((row, len(i)) for (row, _), i in zip(batch, ids, strict=True))

    def _refuse_too_long(self, row: Row, length: int) -> None:
        if length == 0:
            raise ConfigError(f"{row.place}: the prompt has no tokens")
        if self.max_prompt_tokens is not None and length > self.max_prompt_tokens:
            raise ConfigError(
                f"{row.place}: the prompt has {length} tokens, {self.max_prompt_tokens} fit beside sampling.max_tokens "
                "in the model's context; shorten it, lower sampling.max_tokens, or set prompts.drop_longer_than"
            )

    def _short_enough(self, row: Row) -> bool:
        longest = self.config.drop_longer_than
        return longest is None or all(length <= longest for _, length in self._lengths([row]))

    def _read(self, path: str | None) -> list[Row]:
        """The rows of a file, without those that prompts.drop_longer_than leaves out."""
        rows = read_rows(path or "", self.config.source, self.config.columns)
        longest = self.config.drop_longer_than
        if longest is None:
            return rows
        kept = [row for row, length in self._lengths(rows) if length <= longest]
        self._dropped += len(rows) - len(kept)
        if not kept:
            raise ConfigError(
                f"{path}: none of {len(rows)} prompts has at most {longest} tokens; raise prompts.drop_longer_than"
            )
        return kept


class _FileRows:
    """n training rows in a fresh order per epoch, and the held-out ones (from a file of their own, or by content)."""

    def __init__(self, config: PromptsConfig, rows: list[Row], held_out: list[Row] | None, seed: int) -> None:
        self.seed = seed
        if held_out is None:
            self.held_out = sorted(_unique(rows), key=lambda row: row.content)[: config.held_out]
        else:
            self.held_out = held_out[: config.held_out or None]
        if len(self.held_out) < config.held_out:
            raise ConfigError(
                f"prompts.held_out is {config.held_out}, but {config.held_out_path or config.path} has only "
                f"{len(self.held_out)} different prompts; lower it"
            )
        withheld = {row.content for row in self.held_out}
        self.training = [row for row in rows if row.content not in withheld]
        self.n = len(self.training)
        if not self.n:
            raise ConfigError(
                f"{config.path}: all {len(rows)} prompts are held out, none is left to train on; lower prompts.held_out"
            )

    def at(self, ordinal: int) -> Row:
        epoch, position = divmod(ordinal, self.n)
        return self.training[permuted(position, self.n, f"{self.seed}/{epoch}")]

    def to_check(self) -> Iterable[Row]:
        return self.training


class _TaskRows:
    """An endless stream of questions that steps around the held-out ones and those that are too long."""

    def __init__(self, config: PromptsConfig, seed: int, short_enough: Callable[[Row], bool]) -> None:
        assert config.task is not None
        self.task, self._short_enough = config.task, short_enough
        self.stream = ReasoningTask(config.task, config.args, seed)
        evaluation = ReasoningTask(config.task, config.args, HELD_OUT_STREAM)
        candidates = (evaluation.row(i) for i in range(config.held_out * 20 + REDRAWS if config.held_out else 0))
        self.held_out = _first_unique(filter(short_enough, candidates), config.held_out)
        if len(self.held_out) < config.held_out:
            raise ConfigError(
                f"prompts.held_out is {config.held_out}, but task {config.task} with these args has only about "
                f"{len(self.held_out)} different questions; lower it or make the task wider with prompts.args"
            )
        self._withheld = {row.content for row in self.held_out}

    def at(self, ordinal: int) -> Row:
        for redraw in range(REDRAWS):
            row = self.stream.row(ordinal + (redraw << 32))  # far from every other ordinal's own questions
            if row.content not in self._withheld and self._short_enough(row):
                return row
        raise ConfigError(
            f"task {self.task}: {REDRAWS} questions in a row are held out or longer than prompts.drop_longer_than; "
            "lower the one, raise the other, or make the task wider with prompts.args"
        )

    def to_check(self) -> Iterable[Row]:
        return (self.at(ordinal) for ordinal in range(ENDLESS_CHECKED))


def answer_text(tokenizer: Any, token_ids: Sequence[int] | Int32, stop: Sequence[str] = ()) -> str:
    """What rewards see of an answer: its text up to the first stop string, without special tokens."""
    text: str = tokenizer.decode([int(t) for t in token_ids], skip_special_tokens=True)
    cut = min((at for at in (text.find(s) for s in stop if s) if at >= 0), default=len(text))
    return text[:cut]


def permuted(position: int, n: int, key: str) -> int:
    """Where `position` of [0, n) goes under the permutation named `key`: O(1), no table, stable for ever.

    A four-round Feistel network over the smallest even number of bits that hold n, walked until it lands inside
    [0, n) (fewer than four rounds of walking on average, as the square is less than four times n).
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    at = position
    while True:
        left, right = at >> half, at & mask
        for turn in range(4):
            digest = hashlib.blake2b(f"{key}/{turn}/{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        at = left << half | right
        if at < n:
            return at


def _unique(rows: Iterable[Row]) -> Iterator[Row]:
    seen: set[bytes] = set()
    for row in rows:
        if row.content not in seen:
            seen.add(row.content)
            yield row


def _first_unique(rows: Iterable[Row], count: int) -> list[Row]:
    found: list[Row] = []
    for row in _unique(rows) if count else ():
        found.append(row)
        if len(found) == count:
            break
    return found
