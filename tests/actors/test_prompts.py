"""Proves that a prompt is a pure function of (seed, ordinal), that no question is on both sides of the held-out split,
and that every bad file, task or length is refused with its place and a remedy before anything heavy starts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.config import ModelConfig, PromptsConfig
from actors.prompts import PromptSource, answer_text, permuted
from actors.prompts_data import MAKERS, lowercase_share, write
from actors.tiny_llama import byte_tokenizer
from rollout.errors import ConfigError


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer()


def jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def rows(n: int) -> list[dict[str, str]]:
    return [{"prompt": f"question {i}", "answer": str(i)} for i in range(n)]


# ---- ordinals ---------------------------------------------------------------------------------------------------


@given(n=st.integers(1, 300), key=st.text(max_size=5))
def test_permuted_is_a_permutation(n: int, key: str) -> None:
    assert sorted(permuted(i, n, key) for i in range(n)) == list(range(n))


def test_permuted_never_changes() -> None:
    """Written down: a run resumed by a later Headrace must see the same prompts."""
    assert [permuted(i, 10, "0/0") for i in range(10)] == [5, 9, 1, 6, 4, 2, 3, 7, 0, 8]


def test_each_epoch_visits_every_training_row_once_in_its_own_order(tmp_path: Path, tokenizer: Any) -> None:
    config = PromptsConfig(path=jsonl(tmp_path / "p.jsonl", rows(50)), held_out=10)
    source = PromptSource(config, tokenizer, seed=3)
    epochs = [[source.prompt_for(e * 40 + i).text for i in range(40)] for e in range(3)]
    assert all(len(set(e)) == 40 for e in epochs) and len({tuple(e) for e in epochs}) == 3
    assert {frozenset(e) for e in epochs} == {frozenset(epochs[0])}
    again = PromptSource(config, tokenizer, seed=3)
    assert [again.prompt_for(o).text for o in (119, 0, 57)] == [epochs[2][39], epochs[0][0], epochs[1][17]]
    other = PromptSource(config, tokenizer, seed=4)
    assert [other.prompt_for(i).text for i in range(40)] != epochs[0]


def test_a_prompt_carries_ordinal_tokens_and_its_row(tmp_path: Path, tokenizer: Any) -> None:
    path = jsonl(tmp_path / "p.jsonl", [{"prompt": "a\u00e9", "answer": "1", "level": 3}])
    prompt = PromptSource(PromptsConfig(path=path), tokenizer, seed=0).prompt_for(17)
    assert (prompt.ordinal, prompt.text, prompt.meta) == (17, "a\u00e9", {"answer": "1", "level": 3})
    assert prompt.token_ids.dtype == np.int32 and prompt.token_ids.tolist() == [257, 0x61, 0xC3, 0xA9]


# ---- held-out rows ----------------------------------------------------------------------------------------------


def test_held_out_is_by_content_and_the_same_for_every_seed_and_row_order(tmp_path: Path, tokenizer: Any) -> None:
    data = rows(40) + rows(40)[:20]  # half of them twice
    one = PromptSource(PromptsConfig(path=jsonl(tmp_path / "a.jsonl", data), held_out=8), tokenizer, seed=0)
    two = PromptSource(PromptsConfig(path=jsonl(tmp_path / "b.jsonl", data[::-1]), held_out=8), tokenizer, seed=9)
    held = [p.text for p in one.held_out()]
    assert held == [p.text for p in two.held_out()] and len(set(held)) == 8
    assert [p.ordinal for p in one.held_out()] == list(range(-1, -9, -1))
    trained = {one.prompt_for(i).text for i in range(200)}
    assert len(trained) == 32 and not trained & set(held)


def test_a_held_out_file_of_its_own_removes_its_questions_from_training(tmp_path: Path, tokenizer: Any) -> None:
    train, test = jsonl(tmp_path / "a.jsonl", rows(10)), jsonl(tmp_path / "b.jsonl", [*rows(4), {"prompt": "new"}])
    source = PromptSource(PromptsConfig(path=train, held_out_path=test), tokenizer, seed=0)
    assert [p.text for p in source.held_out()] == [f"question {i}" for i in range(4)] + ["new"]
    assert {source.prompt_for(i).text for i in range(60)} == {f"question {i}" for i in range(4, 10)}
    assert len(PromptSource(PromptsConfig(path=train, held_out_path=test, held_out=2), tokenizer, 0).held_out()) == 2


# ---- formats ----------------------------------------------------------------------------------------------------


def test_chat_rows_and_plain_prompts_wrapped_as_chat(tmp_path: Path, tokenizer: Any) -> None:
    user = {"role": "user", "content": "hi"}
    path = jsonl(tmp_path / "p.jsonl", [{"messages": [user]}])
    prompt = PromptSource(PromptsConfig(path=path), tokenizer, 0).prompt_for(0)
    assert prompt.text == "<bos>user: hi\nassistant: "
    assert prompt.token_ids.tolist() == [257, *b"user: hi\nassistant: "]  # one bos, not two
    path = jsonl(tmp_path / "q.jsonl", [{"prompt": "hi"}])
    wrapped = PromptSource(PromptsConfig(path=path, chat=True, system="be brief"), tokenizer, 0).prompt_for(0)
    assert wrapped.text == "<bos>system: be brief\nuser: hi\nassistant: "
    path = jsonl(tmp_path / "r.jsonl", [{"prompt": [user], "reward_model": {"ground_truth": "4"}}])
    config = PromptsConfig(path=path, columns={"answer": "reward_model.ground_truth"})
    nested = PromptSource(config, tokenizer, 0).prompt_for(0)
    assert nested.text == prompt.text and nested.meta["answer"] == "4"


def test_template_and_columns(tmp_path: Path, tokenizer: Any) -> None:
    path = jsonl(tmp_path / "p.jsonl", [{"question": "1 {x}?", "solution": 2}])
    config = PromptsConfig(path=path, columns={"prompt": "question", "answer": "solution"}, template="Q: {prompt}\nA:")
    prompt = PromptSource(config, tokenizer, 0).prompt_for(0)
    assert prompt.text == "Q: 1 {x}?\nA:" and prompt.meta["answer"] == 2


def test_parquet_reads_like_jsonl(tmp_path: Path, tokenizer: Any) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    data = [*rows(20)]
    pq.write_table(pa.Table.from_pylist(data), tmp_path / "p.parquet", row_group_size=7)
    path = jsonl(tmp_path / "p.jsonl", data)
    a = PromptSource(PromptsConfig(source="parquet", path=str(tmp_path / "p.parquet"), held_out=3), tokenizer, 1)
    b = PromptSource(PromptsConfig(path=path, held_out=3), tokenizer, 1)
    assert [a.prompt_for(i).text for i in range(34)] == [b.prompt_for(i).text for i in range(34)]
    assert [p.text for p in a.held_out()] == [p.text for p in b.held_out()]


# ---- reasoning_gym ----------------------------------------------------------------------------------------------


def task(tokenizer: Any, seed: int = 0, **changes: Any) -> PromptSource:
    return PromptSource(PromptsConfig(source="reasoning_gym", **changes), tokenizer, seed)


def test_a_task_is_an_endless_stream_named_by_seed_and_ordinal(tokenizer: Any) -> None:
    source = task(tokenizer, task="chain_sum", held_out=16)
    texts = [source.prompt_for(i).text for i in [*range(300), 10**9]]
    assert len(set(texts)) > 290
    again = task(tokenizer, task="chain_sum", held_out=16)
    assert [again.prompt_for(i).text for i in (10**9, 250)] == [texts[300], texts[250]]
    other = task(tokenizer, 1, task="chain_sum", held_out=16)
    assert [other.prompt_for(i).text for i in range(300)] != texts[:300]
    assert [p.text for p in other.held_out()] == [p.text for p in source.held_out()]


def test_a_narrow_task_never_trains_on_a_held_out_question(tokenizer: Any) -> None:
    """Sums of two digits: 200 questions in all, 150 of them held out."""
    source = task(tokenizer, task="chain_sum", held_out=150, args={"min_terms": 2, "max_terms": 2, "max_digits": 1})
    held = {p.text for p in source.held_out()}
    assert len(held) == 150 and not held & {source.prompt_for(i).text for i in range(500)}


def test_shots_are_the_same_for_every_question_and_solved(tokenizer: Any) -> None:
    source = task(tokenizer, task="chain_sum", shots=2, template="{prompt}")
    *shots_a, asked_a = source.prompt_for(0).text.split("\n\n")
    *shots_b, asked_b = source.prompt_for(1).text.split("\n\n")
    assert len(shots_a) == 2 and shots_a == shots_b and asked_a != asked_b
    assert all(re.search(r"= -?\d+$", shot) for shot in shots_a) and asked_a.endswith("=")


# ---- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"p.jsonl is empty; it needs lines like"),
        ("\n\n", r"p.jsonl is empty"),
        ('{"prompt": "a"}\n\n{"prompt": \n', r"p.jsonl line 3 is not JSON \(.*at column \d+\): '\{\"prompt\":'"),
        ('{"prompt": "a"}\n[1]\n', r"p.jsonl line 2 is list, not an object"),
        ('{"question": "a"}\n', r"line 1 has neither prompt nor messages \(columns: question\); map yours"),
        ('{"prompt": "a", "messages": []}\n', r"line 1 has both prompt and messages"),
        ('{"prompt": "  "}\n', r"line 1: prompt is '  '; it must be a text"),
        ('{"prompt": 7}\n', r"line 1: prompt is 7"),
        ('{"messages": []}\n', r"line 1: messages is \[\]; it must be a list"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"content": "b"}]}\n',
            r"messages\[1\].*needs role and content",
        ),
        ('{"messages": "hi"}\n', r"line 1: messages is 'hi'"),
    ],
)
def test_bad_files_are_named_with_their_line(tmp_path: Path, tokenizer: Any, content: str, message: str) -> None:
    (tmp_path / "p.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=message):
        PromptSource(PromptsConfig(path=str(tmp_path / "p.jsonl")), tokenizer, 0)


def test_unreadable_files(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xe9"}\n')
    (tmp_path / "p.parquet").write_bytes(b"PAR1 and nothing else")
    for config, message in [
        (PromptsConfig(path=str(tmp_path / "none.jsonl")), "none.jsonl does not exist; set prompts.path"),
        (PromptsConfig(path=str(tmp_path)), "is a directory; set prompts.path"),
        (PromptsConfig(path=str(tmp_path / "latin.jsonl")), "line 2 is not UTF-8"),
        (PromptsConfig(source="parquet", path=str(tmp_path / "p.parquet")), "is not a readable parquet file"),
        (
            PromptsConfig(path=jsonl(tmp_path / "c.jsonl", rows(1)), columns={"prompt": "text"}),
            r"line 1 has no column 'text' \(prompts.columns.prompt\); it has prompt, answer",
        ),
    ]:
        with pytest.raises(ConfigError, match=message):
            PromptSource(config, tokenizer, 0)


def test_too_many_held_out(tmp_path: Path, tokenizer: Any) -> None:
    path = jsonl(tmp_path / "p.jsonl", rows(5) + rows(5))
    with pytest.raises(ConfigError, match="all 10 prompts are held out"):
        PromptSource(PromptsConfig(path=path, held_out=5), tokenizer, 0)
    with pytest.raises(ConfigError, match=r"held_out is 6, but .* has only 5 different prompts"):
        PromptSource(PromptsConfig(path=path, held_out=6), tokenizer, 0)
    with pytest.raises(ConfigError, match=r"held_out is 1500, but task chain_sum .* only about 200"):
        task(tokenizer, task="chain_sum", held_out=1500, args={"min_terms": 2, "max_terms": 2, "max_digits": 1})


def test_a_prompt_longer_than_the_context_is_named_with_row_length_and_limit(tmp_path: Path, tokenizer: Any) -> None:
    path = jsonl(tmp_path / "p.jsonl", [{"prompt": "x" * n} for n in (5, 9, 12, 10)])
    source = PromptSource(PromptsConfig(path=path), tokenizer, 0, max_prompt_tokens=11)
    with pytest.raises(ConfigError, match=r"p.jsonl line 3: the prompt has 13 tokens, 11 fit beside"):
        source.check()
    with pytest.raises(ConfigError, match="line 3"):
        [source.prompt_for(i) for i in range(4)]
    kept = PromptSource(PromptsConfig(path=path, drop_longer_than=10), tokenizer, 0, max_prompt_tokens=11)
    report = kept.check()
    assert (report.training_rows, report.longest, report.dropped) == (2, 10, 2)
    with pytest.raises(ConfigError, match="none of 4 prompts has at most 3 tokens"):
        PromptSource(PromptsConfig(path=path, drop_longer_than=3), tokenizer, 0)


def test_an_endless_stream_steps_around_questions_that_are_too_long(tokenizer: Any) -> None:
    free, bound = (task(tokenizer, task="chain_sum", held_out=8, drop_longer_than=n) for n in (None, 75))
    lengths = [len(free.prompt_for(i).token_ids) for i in range(100)]
    assert min(lengths) <= 75 < max(lengths)
    prompts = [bound.prompt_for(i) for i in range(100)] + bound.held_out()
    assert max(len(p.token_ids) for p in prompts) <= 75
    kept = [i for i, n in enumerate(lengths) if n <= 75]
    assert all(bound.prompt_for(i).text == free.prompt_for(i).text for i in kept)
    with pytest.raises(ConfigError, match=r"only about 0 different questions"):
        task(tokenizer, task="chain_sum", held_out=8, drop_longer_than=10)


def test_held_out_prompts_are_measured_too(tmp_path: Path, tokenizer: Any) -> None:
    train = jsonl(tmp_path / "a.jsonl", rows(3))
    test = jsonl(tmp_path / "b.jsonl", [{"prompt": "y" * 50}])
    source = PromptSource(PromptsConfig(path=train, held_out_path=test), tokenizer, 0, max_prompt_tokens=40)
    with pytest.raises(ConfigError, match=r"b.jsonl line 1: the prompt has 51 tokens"):
        source.check()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "chainsum"}, r"prompts.task 'chainsum' is no reasoning_gym task; did you mean chain_sum"),
        ({"task": "chain_sum", "args": {"max_trms": 2}}, "no setting of chain_sum; did you mean max_terms"),
        ({"task": "chain_sum", "args": {"min_terms": 9}}, "refused by task chain_sum: max_terms must be"),
        ({"task": "chain_sum", "args": {"seed": 9}}, "questions follow run.seed"),
        ({"task": "composite"}, "refused by task composite"),
    ],
)
def test_bad_tasks(tokenizer: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        task(tokenizer, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"source": "jsonl"},
        {"source": "reasoning_gym"},
        {"source": "reasoning_gym", "task": "chain_sum", "path": "x"},
        {"path": "x", "task": "chain_sum"},
        {"path": "x", "template": "no place"},
        {"path": "x", "system": "alone"},
        {"path": "x", "sources": "jsonl"},
    ],
)
def test_contradictory_sections_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"prompts|PromptsConfig"):
        PromptsConfig(**changes)


def test_chat_without_a_template_is_refused(tmp_path: Path) -> None:
    plain = byte_tokenizer()
    plain.chat_template = None
    path = jsonl(tmp_path / "p.jsonl", [{"messages": [{"role": "user", "content": "hi"}]}])
    with pytest.raises(ConfigError, match="line 1 is a chat, but the model's tokenizer has no chat template"):
        PromptSource(PromptsConfig(path=path), plain, 0).check()


# ---- answers and data sets --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "stop", "seen"),
    [("[1]\nmore", ("\n",), "[1]"), ("abc", ("x", ""), "abc"), ("a;b.c", (".", ";"), "a"), ("\n", ("\n",), "")],
)
def test_rewards_see_the_answer_up_to_the_first_stop(
    tokenizer: Any, text: str, stop: tuple[str, ...], seen: str
) -> None:
    assert answer_text(tokenizer, [*text.encode(), 258], stop) == seen


def test_sort3_asks_each_question_once_and_never_shows_its_answer(tmp_path: Path, tokenizer: Any) -> None:
    assert write("sort3", tmp_path / "s.jsonl") == 720
    first = (tmp_path / "s.jsonl").read_bytes()
    write("sort3", tmp_path / "s.jsonl")
    assert (tmp_path / "s.jsonl").read_bytes() == first and len(list(tmp_path.iterdir())) == 1
    made = list(MAKERS["sort3"]())
    asked = Counter(row["prompt"].splitlines()[1] for row in made)
    assert max(asked.values()) == 1
    for row in made:
        shown, question = row["prompt"].splitlines()
        assert row["answer"] not in shown
        digits = json.loads(question.removeprefix("sorted(").removesuffix(") ="))
        assert json.loads(row["answer"]) == sorted(digits) and len(set(digits)) == 3
    source = PromptSource(PromptsConfig(path=str(tmp_path / "s.jsonl"), held_out=64), tokenizer, 0)
    held = {p.text.splitlines()[1] for p in source.held_out()}
    assert len(held) == 64 and not held & {source.prompt_for(i).text.splitlines()[1] for i in range(656)}


def test_lowercase_share() -> None:
    assert lowercase_share("", "aB1z", {}) == 0.5 and lowercase_share("", "", {}) == 0.0


def test_open_takes_the_limit_from_the_model(tmp_path: Path) -> None:
    from actors.models import make_tiny_llama

    model = make_tiny_llama(tmp_path / "tiny")
    path = jsonl(tmp_path / "p.jsonl", [{"prompt": "x" * 480}])
    PromptSource.open(PromptsConfig(path=path), ModelConfig(path=str(model)), 0, max_tokens=31).check()
    with pytest.raises(ConfigError, match="481 tokens, 480 fit"):
        PromptSource.open(PromptsConfig(path=path), ModelConfig(path=str(model)), 0, max_tokens=32).check()
    with pytest.raises(ConfigError, match="481 tokens, 68 fit"):
        PromptSource.open(PromptsConfig(path=path), ModelConfig(path=str(model), max_context=100), 0, 32).check()


def test_sections_and_the_data_maker_need_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; import actors.config, actors.prompts, actors.models, actors.rewards.scorer, actors.prompts_data;"
        "actors.prompts_data.main(['letters', '--out', sys.argv[1]]);"
        "heavy = {'torch', 'transformers', 'reasoning_gym', 'ray', 'vllm', 'pyarrow', 'sympy'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    out = tmp_path / "letters.jsonl"
    done = subprocess.run([sys.executable, "-c", code, str(out)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{out}: 676 prompts\n"
