# The commands of everyday work. CMake builds; scripts/setup brings what a bare machine lacks.
# (CMake asks scripts/setup for llama.cpp by itself, and CTest for the tests' model.)

TOOL := build/release/morphkv
MINUTES := 5
FIGURES := docs/data/performance
QUALITY_PAGES := docs/quality.md docs/guided.md
SOURCE_DIRS := include src integrations apps eval tests bench examples python

.PHONY: help setup configure build demo model check test test-soak test-reference bench eval \
  eval-full eval-gemma format tidy clean

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 24

setup:
	@scripts/setup system

configure: setup
	@cmake --preset release >/dev/null

build: configure ## set up and build (release)
	@cmake --build --preset release

demo: configure ## set up, build, and answer from a prompt five times longer than the budget
	@cmake --build --preset release --target morphkv_cli
	@model=$$(scripts/setup model) && \
	ask() { $(TOOL) run -m "$$model" --chat -f examples/demo_prompt.txt \
	  --budget 256 -ub 256 --temp 0 "$$@"; } && \
	printf '%s\n' 'The code of the blue locker stands near the beginning of a letter of 1,400 tokens.' \
	  '' '--- 256 rows, chosen with the question in mind ---' && ask -n 64 && \
	printf '\n%s\n' '--- 256 rows, the most recent ones (--policy streaming) ---' && \
	ask -n 24 --policy streaming && \
	printf '\ntool:  %s\nmodel: %s\n' $(TOOL) "$$model"

model: setup ## print the path of the test model, fetching it if need be
	@scripts/setup model

check: configure ## the quick loop: build and run the unit tests, which need no model (90 seconds)
	@cmake --build --preset release --target unit_tests
	@tests/run_ctest --preset release -L unit -j "$$(nproc)"

test: build ## set up, build and run every test (20 minutes)
	@scripts/setup cross
	@scripts/setup browser
	@tests/run_ctest --preset release -j "$$(nproc)"

test-soak: configure ## random clients against the server for 5 minutes (MINUTES=30: longer)
	@cmake --build --preset release --target morphkv_cli
	@python3 tests/serve_soak.py --tool $(TOOL) -m "$$(scripts/setup model)" --minutes $(MINUTES)

test-reference: setup ## run the reference's own tests against morphkv.mlx (`make test` does too)
	@tests/python/run build/release/tests/python install reference

bench: build ## run the benchmarks and write docs/performance.md
	@mkdir -p $(FIGURES)
	@build/release/bench/kernel_speed --json $(FIGURES)/kernel_speed.json
	@model=$$(scripts/setup model) && set -- -m "$$model" -f examples/demo_prompt.txt && \
	build/release/bench/decode_speed "$$@" --json $(FIGURES)/decode_speed.json && \
	build/release/bench/prefill_speed "$$@" --json $(FIGURES)/prefill_speed.json && \
	python3 bench/memory.py --tool $(TOOL) "$$@" --json $(FIGURES)/memory.json
	@server=$$(scripts/setup llama-server) || { echo 'bench: without the server of' \
	  'llama.cpp there is no serve_speed' >&2; exit 0; }; \
	python3 bench/serve_speed.py --tool $(TOOL) --llama-server "$$server" \
	  -m "$$(scripts/setup model)" -f examples/demo_prompt.txt --json $(FIGURES)/serve_speed.json
	@tests/python/run build/release/tests/python install python bench/reference_speed.py \
	  --cpp build/release/bench/cache_speed --json $(FIGURES)/reference_speed.json
	@python=$$(scripts/setup bench) || { echo 'bench: without the wheels of scripts/setup bench' \
	  'there is no openvino_speed, and docs/performance.md stays as it is' >&2; exit 0; }; \
	"$$python" bench/openvino_speed.py -m "$$(scripts/setup model)" -f examples/demo_prompt.txt \
	  --json $(FIGURES)/openvino_speed.json && \
	"$$python" bench/performance_page.py

eval: build ## measure what is remembered, a small version (15 minutes): build/eval/report.html
	@$(TOOL) eval -m "$$(scripts/setup model)" -o build/eval --quick -t "$$(nproc)"

eval-full: build ## the published one: docs/quality.md, guided.md (hours; goes on where it ended)
	@eval/publish "$$(scripts/setup model)" docs/data/quality/smollm2 \
	  whole stream guided codes codes_far short far text long openvino -- -t "$$(nproc)"
	@python3 eval/quality_tables.py $(QUALITY_PAGES)

eval-gemma: build ## the same for Gemma 3 270M, which is fetched for it
	@eval/publish "$$(scripts/setup gemma)" docs/data/quality/gemma gemma -- -t "$$(nproc)"
	@python3 eval/quality_tables.py $(QUALITY_PAGES)

format: ## format the sources in place
	@find $(SOURCE_DIRS) -name '*.h' -o -name '*.cc' | xargs clang-format -i

tidy: setup ## run clang-tidy over the sources
	@cmake --workflow --preset tidy

clean: ## remove the build directories; downloads and llama.cpp stay in the cache
	@rm -rf build
