"""EcoSpec inside TensorRT-LLM against its own EAGLE-3 and against no speculation, over HTTP: the same answers, and what they cost.

    compare.py OUT [--batches 1,4,8] [--prompts 24] [--tokens 128] -- OPTIONS OF ecospec-orchestrator serve

Greedy decoding must give the tokens of plain decoding, except where two tokens are as good as equally probable: kernels round
differently for different numbers of rows. Each difference is looked up in the plain engine. Exit code 1 when something is wrong.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dram import Sampler
from served import Server, serving

PROMPTS = Path(__file__).resolve().parents[2] / "benchmarks" / "prompts.json"
POLICIES = ("likelihood", "ecospec", "none")  # plain decoding last: it is asked about the others' differences
NAMES = {"likelihood": "EAGLE-3", "ecospec": "EcoSpec", "none": "no speculation"}
SAMPLES, SEEDS = 16, (1, 2, 3)  # of the next token: one that is nearly as probable as the best will be among them
MORE_EXPERTS = 1.02  # than stock EAGLE-3 reads, EcoSpec must not
TIE_NATS = 0.25  # bfloat16 logits of about 30 are 0.125 apart


@dataclass(frozen=True)
class Answer:
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Figures:
    """ms_per_token: of one request, after its first. dram_bytes_per_token: of all GPUs."""

    tokens_per_second: float
    ms_per_token: float
    acceptance_length: float | None
    experts_per_layer_step: float | None
    dram_bytes_per_token: float | None


@dataclass(frozen=True)
class Verdict:
    """ok: None where nothing was measured, which is not a failure."""

    name: str
    ok: bool | None
    detail: str


@dataclass(frozen=True)
class Difference:
    """gap: nats between the two tokens in plain decoding; None when it hardly ever takes the other."""

    policy: str
    batch: int
    prompt: int
    position: int
    gap: float | None


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    prompts = load_prompts(options.prompts)
    sampler = Sampler(options.out)
    answers: dict[tuple[str, int], list[Answer]] = {}
    figures: dict[tuple[str, int], Figures] = {}
    infos: dict[str, dict[str, Any]] = {}
    differences: list[Difference] = []
    for policy in POLICIES:
        print(f"== {NAMES[policy]}", flush=True)
        chosen = [*options.serve, "--policy", policy, "--max-running", str(max(options.batches))]
        with serving(chosen, options.out / f"{policy}.log") as server:
            infos[policy] = json.loads(server.get("/version"))["info"]
            for batch in options.batches:
                server.together(prompts[:batch], 8)  # what is compiled at first use
                key = (policy, batch)
                answers[key], figures[key] = measure(
                    server, prompts, batch, options.tokens, sampler, f"{policy}-{batch}"
                )
                print(f"batch {batch}: {figures[key]}", flush=True)
            if policy == "none":
                differences = [found for key in answers for found in differ(server, *key, answers)]
    verdicts = judge(infos, figures, differences, options.tie, sampler.problem)
    write(options.out, infos, figures, differences, verdicts)
    for verdict in verdicts:
        print(f"{_word(verdict.ok):13}{verdict.name}: {verdict.detail}")
    failed = any(verdict.ok is False for verdict in verdicts)
    print("FAIL" if failed else "PASS", flush=True)
    return int(failed)


def load_prompts(count: int) -> list[str]:
    """Of all families in turn."""
    families = list(json.loads(PROMPTS.read_text(encoding="utf-8")).values())
    longest = max(map(len, families))
    mixed = [family[at] for at in range(longest) for family in families if at < len(family)]
    return [mixed[at % len(mixed)] for at in range(count)]


def measure(
    server: Server, prompts: Sequence[str], batch: int, tokens: int, sampler: Sampler, name: str
) -> tuple[list[Answer], Figures]:
    groups = [prompts[at : at + batch] for at in range(0, len(prompts) - batch + 1, batch)]
    before = server.metrics()
    began = time.monotonic()

    def work() -> tuple[list[dict[str, Any]], float]:
        found = [answer for group in groups for answer in server.together(group, tokens)]
        return found, time.monotonic() - began

    (bodies, seconds), dram = sampler.during(work, name)
    after = server.metrics()
    rise = {key: value - before.get(key, 0.0) for key, value in after.items()}
    choices = [body["choices"][0] for body in bodies]
    answers = [Answer(tuple(choice["prompt_token_ids"]), tuple(choice["token_ids"])) for choice in choices]
    made = sum(len(answer.tokens) for answer in answers)
    drafts, layer_steps = (
        rise.get("spec_decode_num_drafts_total", 0),
        rise.get("distinct_experts_per_layer_step_count", 0),
    )
    return answers, Figures(
        made / seconds,
        1e3 * rise["request_decode_time_seconds_sum"] / max(1, made - len(answers)),
        1 + rise["spec_decode_num_accepted_tokens_total"] / drafts if drafts else None,
        rise["distinct_experts_per_layer_step_sum"] / layer_steps if layer_steps else None,
        dram / made if dram is not None else None,
    )


def differ(plain: Server, policy: str, batch: int, answers: dict[tuple[str, int], list[Answer]]) -> list[Difference]:
    """Where a policy's answers leave plain decoding's of the same batch size, at their first other token."""
    found = []
    for number, (ours, theirs) in enumerate(zip(answers[policy, batch], answers["none", batch], strict=True)):
        pairs = zip(ours.tokens, theirs.tokens, strict=False)
        at = next((i for i, (mine, other) in enumerate(pairs) if mine != other), None)
        if at is not None:
            gap = preference(plain, (*theirs.prompt, *theirs.tokens[:at]), theirs.tokens[at], ours.tokens[at])
            found.append(Difference(policy, batch, number, at, gap))
    return found


def preference(plain: Server, text: tuple[int, ...], token: int, other: int) -> float | None:
    """Nats between two tokens after a text, as plain decoding sees it; None when one is not among its samples."""
    numbers = {}
    for seed in SEEDS:
        body = plain.complete(prompt=list(text), max_tokens=1, logprobs=0, temperature=1, seed=seed, n=SAMPLES)
        numbers |= {c["token_ids"][0]: c["logprobs"]["token_logprobs"][0] for c in body["choices"]}
    return abs(numbers[token] - numbers[other]) if token in numbers and other in numbers else None


def judge(
    infos: dict[str, dict[str, Any]],
    figures: dict[tuple[str, int], Figures],
    differences: Sequence[Difference],
    tie: float,
    problem: str | None,
) -> list[Verdict]:
    verdicts = []
    if infos["ecospec"].get("engine") == "tensorrt-llm":
        modes = {policy: infos[policy].get("selection") for policy in POLICIES}
        right = modes["ecospec"] in ("graph", "eager") and modes["likelihood"] == "stock"
        verdicts.append(Verdict("node selection", right, f"modes {modes}"))
    for policy in ("likelihood", "ecospec"):
        mine = [found for found in differences if found.policy == policy]
        worse = [found for found in mine if found.gap is None or found.gap > tie]
        detail = f"{len(mine)} answers leave plain decoding's, {len(worse)} of them where tokens are no nearer than {tie} nats"
        verdicts.append(Verdict(f"losslessness of {NAMES[policy]}", not worse, detail))
    for policy in ("likelihood", "ecospec"):
        lengths = {batch: f.acceptance_length for (name, batch), f in figures.items() if name == policy}
        shown = ", ".join(f"{_number(length)} at batch {batch}" for batch, length in lengths.items())
        accepted = all(length is not None and length > 1 for length in lengths.values())
        verdicts.append(Verdict(f"acceptance length of {NAMES[policy]}", accepted, shown))
    verdicts.append(_experts(figures))
    sampled = all(f.dram_bytes_per_token is not None for f in figures.values())
    verdicts.append(
        Verdict("bytes by profiler", True if sampled else None, "see the table" if sampled else problem or "no samples")
    )
    return verdicts


def _experts(figures: dict[tuple[str, int], Figures]) -> Verdict:
    ratios = {}
    for (policy, batch), mine in figures.items():
        stock = figures["likelihood", batch].experts_per_layer_step
        if policy == "ecospec":
            if mine.experts_per_layer_step is None or stock is None:
                return Verdict("distinct experts", False, "they were not counted")
            ratios[batch] = mine.experts_per_layer_step / stock
    shown = ", ".join(f"{ratio:.3f} of EAGLE-3's at batch {batch}" for batch, ratio in ratios.items())
    return Verdict("distinct experts", all(ratio <= MORE_EXPERTS for ratio in ratios.values()), shown)


def write(
    out: Path,
    infos: dict[str, dict[str, Any]],
    figures: dict[tuple[str, int], Figures],
    differences: Sequence[Difference],
    verdicts: Sequence[Verdict],
) -> None:
    rows = [{"policy": policy, "batch": batch} | asdict(found) for (policy, batch), found in figures.items()]
    document = {
        "infos": infos,
        "figures": rows,
        "differences": [asdict(found) for found in differences],
        "verdicts": [asdict(verdict) for verdict in verdicts],
    }
    (out / "report.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
    lines = [
        "| batch | policy | tokens/s | ms/token | faster than plain | acceptance length | experts/layer/step | MB read/token |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|")
    for (policy, batch), f in sorted(figures.items(), key=lambda item: (item[0][1], POLICIES.index(item[0][0]))):
        faster = figures["none", batch].ms_per_token / f.ms_per_token
        mb = None if f.dram_bytes_per_token is None else f.dram_bytes_per_token / 1e6
        cells = (f.tokens_per_second, f.ms_per_token, faster, f.acceptance_length, f.experts_per_layer_step, mb)
        lines.append(f"| {batch} | {NAMES[policy]} | " + " | ".join(map(_number, cells)) + " |")
    lines += ["", *(f"- {_word(verdict.ok)}: {verdict.name}: {verdict.detail}" for verdict in verdicts)]
    (out / "report.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _word(ok: bool | None) -> str:
    return "not measured" if ok is None else "ok" if ok else "WRONG"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path, help="a folder for the report, the logs and the profiler's files")
    numbers = lambda text: tuple(int(part) for part in text.split(","))
    parser.add_argument("--batches", type=numbers, default=(1, 4, 8), help="requests at a time")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--tie", type=float, default=TIE_NATS, help="nats that two equally good tokens may be apart")
    parser.add_argument("serve", nargs="+", help="options of ecospec-orchestrator serve, after --")
    options = parser.parse_args(arguments)
    if options.prompts < max(options.batches):
        parser.error(f"--prompts is {options.prompts}; at least {max(options.batches)}, the largest batch, is needed.")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
