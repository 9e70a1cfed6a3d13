"""Time per token and time to read a prompt of OpenVINO GenAI on the same GGUF file, on the CPU: its
full cache and its cache eviction at 512 rows. K and V are in f16 as in the other benchmarks; its
default, u8, is slower at long contexts. Its answers are checked before anything is timed.

Run by `make bench`, or: "$(scripts/setup bench)" bench/openvino_speed.py -m MODEL -f TEXT
"""

import argparse
import os
import pathlib
import statistics
import sys

import numpy as np
import openvino
import openvino_genai as genai

import report

ROWS, START, RECENT = 512, 32, 128  # the cache that evicts; it works in blocks of 32 rows
STEPS = 64  # decode steps per point
FULL = "OpenVINO GenAI, full"
EVICTION = f"OpenVINO GenAI, cache eviction, {ROWS} rows"


def scheduler(evict: bool) -> genai.SchedulerConfig:
    config = genai.SchedulerConfig()
    config.enable_prefix_caching = False  # a second round reads its prompt again
    config.use_cache_eviction = evict
    if evict:
        config.cache_eviction_config = genai.CacheEvictionConfig(
            START, RECENT, ROWS, genai.AggregationMode.NORM_SUM
        )
    return config


def greedy(tokens: int, **options) -> genai.GenerationConfig:
    config = genai.GenerationConfig()
    config.do_sample = False
    config.max_new_tokens = tokens
    for name, value in options.items():
        setattr(config, name, value)
    return config


class Arm:
    """One pipeline, which loads the model for itself."""

    def __init__(self, name: str, options: argparse.Namespace, properties: dict) -> None:
        self.name = name
        self.pipeline = genai.LLMPipeline(
            options.model, "CPU", scheduler_config=scheduler(name == EVICTION), **properties
        )

    def tokens(self, text: str) -> np.ndarray:
        """Token ids of the text, [tokens]; the tokenizer cuts what is longer than the training."""
        tokenizer = self.pipeline.get_tokenizer()
        return tokenizer.encode(text, add_special_tokens=False).input_ids.data[0]

    def generate(self, prompt: np.ndarray, tokens: int) -> genai.EncodedResults:
        ids = np.ascontiguousarray(prompt[None, :])
        inputs = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        return self.pipeline.generate(inputs, greedy(tokens, ignore_eos=True))

    def answer(self, question: str) -> str:
        return str(self.pipeline.generate(question, greedy(24)))

    def points(self, text: np.ndarray, lengths: list[int], rounds: int) -> list[dict]:
        points = []
        for length in lengths:
            prompt, decode, prefill = text[:length], [], []
            for _ in range(rounds):
                print(f"{self.name} at {length} tokens", file=sys.stderr)
                metrics = self.generate(prompt, STEPS + 1).perf_metrics
                ms = [us / 1000 for us in metrics.raw_metrics.m_durations]
                if len(ms) != STEPS or metrics.get_num_input_tokens() != len(prompt):
                    sys.exit("openvino_speed: error: not the tokens that were asked for")
                decode += ms
                prefill.append(metrics.get_ttft().mean)
            step = report.spread(decode)
            points.append({
                "context_tokens": length,
                **step,
                "tokens_per_second": 1000 / step["median_ms"],
                "prefill_ms": statistics.median(prefill),
            })
        return points


def check(arm: Arm, text: np.ndarray, expected: list[int]) -> list[int]:
    """The answer is sensible and the same each time; a cache that never fills changes nothing."""
    tokens = list(arm.generate(text[:300], 24).tokens[0])
    if expected and tokens != expected:
        sys.exit("openvino_speed: error: eviction changes the tokens though nothing is evicted")
    if arm.name == FULL:  # with eviction a prompt below some 40 tokens is refused
        answers = {arm.answer("What is the capital of France?") for _ in range(2)}
        if len(answers) != 1 or "Paris" not in answers.pop():
            sys.exit("openvino_speed: error: the capital of France is not Paris")
    return tokens


def print_table(figures: dict) -> None:
    print("| cache | context | ms per token (p10-p90) | tokens per second | reading, s |")
    print("|---|---|---|---|---|")
    for arm in figures["arms"]:
        for p in arm["points"]:
            print(f"| {arm['arm']} | {p['context_tokens']} | {p['median_ms']:.1f} "
                  f"({p['p10_ms']:.1f}-{p['p90_ms']:.1f}) | {p['tokens_per_second']:.0f} "
                  f"| {p['prefill_ms'] / 1000:.1f} |")
    print(f"\nK and V in {figures['kv_precision']} (OpenVINO's default here: "
          f"{figures['default_kv_precision']}), computed in {figures['inference_precision']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("-m", "--model", required=True, help="GGUF model")
    parser.add_argument("-f", "--file", required=True, help="text to read, repeated as needed")
    parser.add_argument("-t", "--threads", type=int, default=os.cpu_count(), help="[%(default)s]")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1000, 7500],
                        help="tokens of context, ascending %(default)s")
    parser.add_argument("--rounds", type=int, default=1, help="how often [%(default)s]")
    parser.add_argument("--kv-precision", default="f16", help="of K and V: u8, f16 [%(default)s]")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()

    core = openvino.Core()
    properties = {
        "INFERENCE_NUM_THREADS": options.threads,
        "KV_CACHE_PRECISION": options.kv_precision,
    }
    content = pathlib.Path(options.file).read_text()
    content *= 1 + 8 * max(options.lengths) // len(content)  # a token has fewer than 8 letters

    arms, tokens = [], []
    for name in (FULL, EVICTION):
        arm = Arm(name, options, properties)
        text = arm.tokens(content)
        if len(text) < max(options.lengths):
            sys.exit(f"openvino_speed: error: the text has only {len(text)} tokens")
        tokens = check(arm, text, tokens)
        arms.append({"arm": name, "points": arm.points(text, options.lengths, options.rounds)})
        del arm

    figures = {
        **report.head("openvino_speed"),
        "openvino_version": genai.__version__,
        "threads": options.threads,
        "model": pathlib.Path(options.model).name,
        "kv_precision": options.kv_precision,
        "default_kv_precision": core.get_property("CPU", "KV_CACHE_PRECISION").get_type_name(),
        "inference_precision": core.get_property("CPU", "INFERENCE_PRECISION_HINT").get_type_name(),
        "eviction": {"start": START, "recent": RECENT, "max": ROWS, "mode": "NORM_SUM"},
        "steps": STEPS, "rounds": options.rounds,
        "arms": arms,
    }
    print_table(figures)
    report.write(figures, options.json)


if __name__ == "__main__":
    main()
