# SPDX-License-Identifier: Apache-2.0
"""--tasks end to end: a tiny random model, local task files, no network."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest
import torch

# why first: both libraries read these when they are imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

pytestmark = pytest.mark.slow
pytest.importorskip("lm_eval", reason="not installed: lm_eval; run: pip install '.[tasks]'")
transformers = pytest.importorskip("transformers")

import datasets  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402

from mpfa import __main__ as command_line  # noqa: E402
from mpfa.accuracy.tasks_fp8 import Fp8Cache  # noqa: E402
from mpfa.accuracy.tasks_lm import CachedModel, TaskRunner  # noqa: E402
from mpfa.accuracy.tasks_specs import TaskSpec, select_tasks  # noqa: E402
from mpfa.integrations.transformers import MpfaCache  # noqa: E402

WORDS = [
    "river",
    "stone",
    "copper",
    "bird",
    "cloud",
    "table",
    "window",
    "garden",
    "silver",
    "letter",
    "horse",
    "bridge",
]
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHOICE_TASK = """\
task: tiny_choice
dataset_path: json
dataset_kwargs: {{data_files: {{train: {folder}/choice.jsonl, test: {folder}/choice.jsonl}}}}
output_type: multiple_choice
training_split: train
test_split: test
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
GENERATE_TASK = """\
task: tiny_generate
dataset_path: json
dataset_kwargs: {{data_files: {{train: {folder}/generate.jsonl, test: {folder}/generate.jsonl}}}}
output_type: generate_until
training_split: train
test_split: test
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 4, do_sample: true, temperature: 0.9}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
num_fewshot: 1
"""


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> str:
    """Llama, 2 layers, GQA 4:2, head_dim 64, random weights; one token per byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=258,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
        bos_token_id=256,
        eos_token_id=257,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "proj" in name:
                weight.mul_(6.0)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(alphabet)} | {"<s>": 256, "</s>": 257}
    bytewise = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=bytewise, bos_token="<s>", eos_token="</s>", chat_template=CHAT_TEMPLATE
    ).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def tasks_folder(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("tasks")
    generator = torch.Generator().manual_seed(3)
    choice, generate = [], []
    for i in range(6):
        picked = [WORDS[int(k)] for k in torch.randperm(len(WORDS), generator=generator)[:6]]
        question = " ".join(picked[: 2 + i % 4])
        choice.append({"question": question, "choices": picked[2:5], "answer": i % 3})
        generate.append({"question": question, "answer": picked[0]})
    for name, docs in (("choice", choice), ("generate", generate)):
        lines = "".join(json.dumps(doc) + "\n" for doc in docs)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    (folder / "choice.yaml").write_text(CHOICE_TASK.format(folder=folder), encoding="utf-8")
    (folder / "generate.yaml").write_text(GENERATE_TASK.format(folder=folder), encoding="utf-8")
    return str(folder)


def load(folder: str, dtype: torch.dtype = torch.float32):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def loglikelihoods(lm, requests: list[tuple[str, str]]) -> list[tuple[float, bool]]:
    return lm.loglikelihood(
        [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(requests)],
        disable_tqdm=True,
    )


REQUESTS = [
    ("a river and a stone", " bird"),
    ("a river and a stone", " b"),
    ("a river and a stone", " x"),
    ("cloud", " table of silver"),
    ("the window of a garden near the old bridge", " horse"),
    ("", "letter"),
]


def test_scores_are_those_of_lm_eval(model_folder: str) -> None:
    """The masked, grouped batches give what lm_eval's own loop gives; rolling windows too."""
    model, tokenizer = load(model_folder)
    expected_lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, max_length=256)
    expected = loglikelihoods(expected_lm, REQUESTS)
    # Longer than max_length, so that windows roll.
    long = [Instance("loglikelihood_rolling", {}, (" ".join(WORDS * 8),), 0)]
    expected_rolling = expected_lm.loglikelihood_rolling(long, disable_tqdm=True)
    assert math.isfinite(expected_rolling[0])
    for batch_size in (1, 4):
        lm = CachedModel(model, tokenizer, batch_size, 256)
        for got, want in zip(loglikelihoods(lm, REQUESTS), expected, strict=True):
            assert got[0] == pytest.approx(want[0], abs=2e-3) and got[1] == want[1]
        rolling = lm.loglikelihood_rolling(long, disable_tqdm=True)
        assert rolling == pytest.approx(expected_rolling, rel=1e-4)


@pytest.mark.parametrize("row", ["bf16", "mean:request", "fp8"])
def test_padding_does_not_enter(model_folder: str, row: str) -> None:
    """Batches of requests of different lengths score as single requests: neither cache, nor means,
    nor FP8 scales see padding. float64 because matrix products depend on the batch in fp32."""
    model, tokenizer = load(model_folder, torch.float64)
    plain = loglikelihoods(CachedModel(model, tokenizer, 1, None), REQUESTS)
    model.set_attn_implementation("mpfa")
    makers = {
        "bf16": lambda: MpfaCache(model.config, format="bf16"),
        "mean:request": lambda: MpfaCache(model.config, compensation="mean"),
        "fp8": lambda: Fp8Cache(model.config),
    }
    results = []
    for batch_size in (1, 3, 6):
        lm = CachedModel(model, tokenizer, batch_size, None)
        lm.make_cache = makers[row]
        results.append(loglikelihoods(lm, REQUESTS))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert a[0] == pytest.approx(b[0], abs=1e-7) and a[1] == b[1]
    bound = {"bf16": 0.05, "mean:request": 1.0, "fp8": 1.0}[row]
    for a, b in zip(results[0], plain, strict=True):
        assert 0 < abs(a[0] - b[0]) < bound


def test_nan_is_no_wrong_answer(model_folder: str) -> None:
    model, tokenizer = load(model_folder)
    with torch.no_grad():
        model.model.norm.weight[3] = torch.nan
    with pytest.raises(RuntimeError, match="log probabilities are NaN"):
        loglikelihoods(CachedModel(model, tokenizer, 2, None), REQUESTS)


def test_same_prompts_every_time(model_folder: str, tasks_folder: str) -> None:
    """Few-shot examples are drawn once: an evaluation after another sees the same prompts."""
    model, tokenizer = load(model_folder)
    spec = TaskSpec("tiny_choice", ("tiny_choice",), shots=2)
    settings = {"tokenizer_name": model_folder, "ruler_length": 4096, "tasks_path": tasks_folder}
    runner = TaskRunner([spec], **settings)
    lm = CachedModel(model, tokenizer, 4, None)
    first, second = runner.evaluate(lm, spec), runner.evaluate(lm, spec)
    assert first == second and len(first.values) == 6 and set(first.values) <= {0.0, 1.0}
    other = TaskSpec("tiny_choice", ("tiny_choice",), shots=1)
    assert TaskRunner([other], **settings).evaluate(lm, other).digest != first.digest


def test_chat_template(model_folder: str, tasks_folder: str) -> None:
    model, tokenizer = load(model_folder)
    spec = TaskSpec("tiny_generate", ("tiny_generate",))
    settings = {"tokenizer_name": model_folder, "ruler_length": 4096, "tasks_path": tasks_folder}
    outcomes = []
    for chat in (False, True):
        runner = TaskRunner([spec], chat=chat, limit=2, **settings)
        outcomes.append(runner.evaluate(CachedModel(model, tokenizer, 2, None), spec))
        task = runner.tasks["tiny_generate"]["tiny_generate"]
        prompt = task.instances[0].args[0]
        assert prompt.endswith("<assistant>") == chat and ("<user>" in prompt) == chat
    assert outcomes[0].digest != outcomes[1].digest


def made_up_dataset(path: str, name: str | None = None, **_: object) -> datasets.DatasetDict:
    """A few documents with the fields of the real data set."""
    words = iter(WORDS * 100)

    def text(count: int) -> str:
        return " ".join(next(words) for _ in range(count))

    if path == "cais/mmlu":
        splits = {"test": 1, "dev": 5}

        def doc(i):
            return {"question": text(4), "choices": [text(1) for _ in range(4)], "answer": i % 4}

    elif path == "Rowan/hellaswag":
        splits = {"train": 24, "validation": 1}

        def doc(i):
            return {
                "activity_label": text(1), "ctx_a": text(3), "ctx_b": text(2),
                "endings": [text(2) for _ in range(4)], "label": str(i % 4),
            }  # fmt: skip

    elif path == "allenai/winogrande":
        splits = {"train": 2, "validation": 1}

        def doc(i):
            return {"sentence": f"{text(2)} _ {text(2)}.", "option1": text(1), "option2": text(1),
                    "answer": str(1 + i % 2)}  # fmt: skip

    elif path == "openai/gsm8k":
        splits = {"train": 8, "test": 1}

        def doc(i):
            return {"question": text(5), "answer": f"{text(4)}\n#### {i}"}

    else:
        raise AssertionError(path)
    return datasets.DatasetDict(
        {s: datasets.Dataset.from_list([doc(i) for i in range(n)]) for s, n in splits.items()}
    )


class MadeUpResponse:
    """What RULER's questions are downloaded from: SQuAD's or HotpotQA's layout by address."""

    def __init__(self, url: str) -> None:
        self.squad = "SQuAD" in url

    def raise_for_status(self) -> None:
        pass

    def json(self) -> object:
        texts = [f"{i} " + " ".join(WORDS) for i in range(600)]
        if not self.squad:
            return [
                {"question": f"which {i}?", "answer": "a river", "context": [[f"t{i}", [text]]]}
                for i, text in enumerate(texts)
            ]
        answers = [{"text": "a stone"}]
        return {
            "data": [
                {"paragraphs": [{"context": text, "qas": [
                    {"question": f"what {i}?", "answers": answers, "is_impossible": False}]}]}
                for i, text in enumerate(texts)
            ]
        }  # fmt: skip


def test_the_papers_tasks(model_folder: str, monkeypatch) -> None:
    """The task files that lm_eval ships, over made-up documents: shots, metrics and filters exist."""
    import requests

    monkeypatch.setattr(datasets, "load_dataset", made_up_dataset)
    monkeypatch.setattr(requests, "get", lambda url, **_: MadeUpResponse(url))
    specs = select_tasks("mmlu,hellaswag,winogrande,gsm8k,ruler_qa", None, 4096)
    runner = TaskRunner(specs, tokenizer_name=model_folder, ruler_length=4096, limit=1)
    model, tokenizer = load(model_folder)
    lm = CachedModel(model, tokenizer, 8, None)
    counts = {"mmlu": 57, "hellaswag": 1, "winogrande": 1, "gsm8k": 1, "ruler_qa": 2}
    shots = {"mmlu": 5, "hellaswag": 20, "winogrande": 0, "gsm8k": 5, "ruler_qa": 0}
    # How each document's prompt begins, to count the few-shot examples in it.
    markers = {
        "mmlu": "Answer:",
        "gsm8k": "Question:",
        "hellaswag": "\n\n",
        "ruler_qa": "Question:",
    }
    for spec in specs:
        assert runner.shots(spec) == shots[spec.name]
        outcome = runner.evaluate(lm, spec)
        assert len(outcome.values) == counts[spec.name], spec.name
        assert all(0.0 <= value <= 1.0 for value in outcome.values)
        task = next(iter(runner.tasks[spec.name].values()))
        if spec.name in markers:
            seen = task.instances[0].args[0].count(markers[spec.name])
            assert seen == shots[spec.name] + (spec.name != "hellaswag"), spec.name
        if task.get_config("output_type") == "generate_until":
            assert task.get_config("generation_kwargs")["do_sample"] is False
        if spec.name == "ruler_qa":
            length = len(tokenizer(task.instances[0].args[0]).input_ids)
            assert 2900 < length <= 4096
        if spec.name == "gsm8k":
            assert "exact_match,flexible-extract" in outcome.others
        if spec.name == "hellaswag":
            assert "acc,none" in outcome.others


def run_command(*arguments: str) -> int:
    return command_line.main(["accuracy", *arguments])


def test_command(model_folder: str, tasks_folder: str, tmp_path, capsys) -> None:
    """Both kinds of task over all rows: table, JSON, markdown, resumption."""
    rows = "fp8,mxfp8,none,mean:request,mean,channels4+4/6,mean+channels3+4/6"
    arguments = [
        "--model", model_folder, "--tasks", "tiny_choice,tiny_generate",
        "--tasks-path", tasks_folder, "--formats", rows, "--shots", "tiny_choice=2",
        "--batch-size", "4", "--calibration-tokens", "128", "--json", str(tmp_path / "out.json"),
        "--markdown", str(tmp_path / "out.md"), "--seed", "3",
    ]  # fmt: skip
    assert run_command(*arguments) == 0
    document = json.loads((tmp_path / "out.json").read_text())
    keys = ["sdpa", "bf16", *rows.split(",")]
    assert [row["key"] for row in document["rows"]] == keys and document["skipped"] == []
    assert [(t["name"], t["shots"], t["metric"]) for t in document["tasks"]] == [
        ("tiny_choice", 2, "acc"),
        ("tiny_generate", 1, "exact_match"),
    ]
    for name in ("tiny_choice", "tiny_generate"):
        assert len({row["results"][name]["digest"] for row in document["rows"]}) == 1
        assert all(len(row["results"][name]["values"]) == 6 for row in document["rows"])
    printed = capsys.readouterr().out
    markdown = (tmp_path / "out.md").read_text()
    assert markdown in printed and "| tiny_choice (2-shot, acc), n=6" in markdown

    # Resumed: everything is kept, one result is taken away and comes back.
    del document["rows"][3]["results"]["tiny_generate"]
    document["rows"][1]["results"]["tiny_choice"]["seconds"] = 12345.0
    (tmp_path / "out.json").write_text(json.dumps(document))
    assert run_command(*arguments, "--resume") == 0
    again = json.loads((tmp_path / "out.json").read_text())
    assert again["rows"][1]["results"]["tiny_choice"]["seconds"] == 12345.0
    assert len(again["rows"][3]["results"]["tiny_generate"]["values"]) == 6
    # What this run does not ask for stays in the file.
    fewer = ["tiny_choice" if a == "tiny_choice,tiny_generate" else a for a in arguments]
    fewer[fewer.index(rows)] = "none"
    assert run_command(*fewer, "--resume") == 0
    kept = json.loads((tmp_path / "out.json").read_text())
    assert kept["tasks"] == again["tasks"]
    results = {row["key"]: row["results"] for row in kept["rows"]}
    assert results == {row["key"]: row["results"] for row in again["rows"]}
    capsys.readouterr()
    assert run_command(*arguments, "--resume", "--shots", "tiny_choice=1") == 2
    assert "has task tiny_choice as" in capsys.readouterr().err
    assert run_command(*arguments, "--resume", "--limit", "3") == 2
    assert "was made with limit None, this run has 3" in capsys.readouterr().err


def test_command_in_a_process_of_its_own(model_folder: str, tasks_folder: str) -> None:
    """Nothing that this file imports is needed for the command to work."""
    done = subprocess.run(
        [
            sys.executable, "-m", "mpfa", "accuracy", "--model", model_folder, "--tasks",
            "tiny_choice", "--tasks-path", tasks_folder, "--limit", "2", "--formats", "none",
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "| none " in done.stdout and "Only the first 2 examples" in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "tiny_other"], "has no task 'tiny_other'"),
        (["--tasks", "tiny_choice", "--formats", "eigen4"], "'eigen4' is not available with"),
        (["--tasks", "tiny_choice", "--resume"], "resume: needs --json"),
        (["--tasks", "tiny_choice", "--config-json", '{"rope": 1}'], "has no field 'rope'"),
        (["--tasks", "tiny_choice", "--json", "/no/such/out.json"], "is in no existing folder"),
        (["--tasks", "tiny_choice", "--tokens", "512"], "tokens: not used with --tasks"),
        (["--tasks", "tiny_choice", "--device", "moon"], "device: "),
        (["--tasks", "tiny_choice", "--model", "/no/such/model"], "cannot be loaded"),
    ],
)
def test_refusals(model_folder, tasks_folder, capsys, options, message) -> None:
    assert run_command("--model", model_folder, "--tasks-path", tasks_folder, *options) == 2
    assert message in capsys.readouterr().err


def test_generation_is_greedy(model_folder: str, tasks_folder: str) -> None:
    """The task file asks for sampling; the runner does not sample."""
    spec = TaskSpec("tiny_generate", ("tiny_generate",))
    runner = TaskRunner(
        [spec], tokenizer_name=model_folder, ruler_length=4096, tasks_path=tasks_folder
    )
    kwargs = runner.tasks["tiny_generate"]["tiny_generate"].get_config("generation_kwargs")
    assert (kwargs["do_sample"], kwargs["temperature"]) == (False, 0.0)
    assert kwargs["max_gen_toks"] == 4 and kwargs["until"] == ["\n"]
