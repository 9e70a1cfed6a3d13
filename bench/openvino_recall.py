"""Recall of OpenVINO GenAI on the questions of `morphkv eval`, with its full cache and its cache
eviction, greedy, on the same GGUF file. The whole prompt is read, then rows leave: mode `whole`.

The questions come from `morphkv eval --export FILE`; the answers are appended, as trials of the
arms below, to a trials.jsonl of morphkv eval, whose next run reports them with the others. Only
questions without choices are asked: generated text does not show what comes second. A part of an
answer is right when the text generated after the parts before it begins with it.

Run: "$(scripts/setup bench)" bench/openvino_recall.py -m MODEL --questions FILE --trials FILE
"""

import argparse
import json
import os
import sys
import time

import numpy as np
import openvino
import openvino_genai as genai

FULL = "OpenVINO GenAI"
EVICTION = "OpenVINO GenAI eviction"
START, BLOCK = 32, 32  # first rows that stay; the cache that evicts works in blocks


def scheduler(rows):
    config = genai.SchedulerConfig()
    config.enable_prefix_caching = False
    config.use_cache_eviction = rows > 0
    if rows:
        recent = max(BLOCK, rows // 4)
        config.cache_eviction_config = genai.CacheEvictionConfig(
            START, recent, rows, genai.AggregationMode.NORM_SUM)
    return config


class Pipeline:
    """One cache; it loads the model for itself."""

    def __init__(self, options, rows):
        self.pipeline = genai.LLMPipeline(options.model, "CPU", scheduler_config=scheduler(rows),
                                          INFERENCE_NUM_THREADS=options.threads,
                                          KV_CACHE_PRECISION="f16")
        self.tokenizer = self.pipeline.get_tokenizer()

    def tokens(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).input_ids.data[0]

    def goes_on_with(self, prompt, expected):
        """Whether the text that it generates after `prompt` begins with `expected`."""
        ids = np.ascontiguousarray(self.tokens(prompt)[None, :])
        inputs = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        config = genai.GenerationConfig()
        config.do_sample = False
        config.ignore_eos = True
        config.max_new_tokens = len(self.tokens(expected)) + 2
        generated = self.pipeline.generate(inputs, config)
        text = self.tokenizer.decode(list(generated.tokens[0]))
        return text.startswith(expected), text, ids.shape[1]


def trial(question, arm, rows, right, text, prompt_tokens, seconds, threads):
    return {
        "task": question["task"], "mode": "whole", "tokens": question["tokens"], "arm": arm,
        "budget": rows, "document": question["document"], "question": question["question"],
        "score": sum(right) / len(right), "measures": {}, "text": text, "depth": question["depth"],
        "prompt_tokens": prompt_tokens, "tokens_judged": 0, "rows_kept": rows or prompt_tokens,
        "kv_bytes_kept": 0, "kv_bytes_allocated": 0, "read_ms": 1000 * seconds, "step_ms": 0.0,
        "evict_ms": 0.0, "threads": threads,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("-m", "--model", required=True, help="GGUF model")
    parser.add_argument("--questions", required=True, help="what `morphkv eval --export` wrote")
    parser.add_argument("--trials", required=True, help="trials.jsonl to append to")
    parser.add_argument("--rows", type=int, nargs="+", default=[0, 128, 256, 512],
                        help="of the cache; 0 = all %(default)s")
    parser.add_argument("-t", "--threads", type=int, default=os.cpu_count(), help="[%(default)s]")
    options = parser.parse_args()

    with open(options.questions, encoding="utf-8") as file:
        questions = [json.loads(line) for line in file]
    questions = [q for q in questions if not q["choices"]]
    with open(options.trials, encoding="utf-8") as file:
        done = {(t["task"], t["tokens"], t["arm"], t["budget"], t["document"], t["question"])
                for t in map(json.loads, list(file)[1:])}
    for rows in options.rows:
        arm = EVICTION if rows else FULL
        missing = [q for q in questions
                   if (q["task"], q["tokens"], arm, rows, q["document"], q["question"]) not in done]
        if not missing:
            continue
        pipeline = Pipeline(options, rows)
        right_parts = 0
        for i, question in enumerate(missing):
            prompt = question["text"] + question["asked"]
            right, texts, started = [], [], time.monotonic()
            for part in question["answer"]:
                hit, text, prompt_tokens = pipeline.goes_on_with(prompt, part)
                right.append(hit)
                texts.append(text)
                prompt += part
            seconds = (time.monotonic() - started) / len(right)
            line = trial(question, arm, rows, right, "|".join(texts), prompt_tokens, seconds,
                         options.threads)
            with open(options.trials, "a", encoding="utf-8") as file:
                file.write(json.dumps(line, separators=(",", ":")) + "\n")
            right_parts += line["score"]
            print(f"\r{arm}, {rows} rows: {right_parts:g} of {i + 1}", end="", file=sys.stderr)
        print(file=sys.stderr)


if __name__ == "__main__":
    main()
