"""morphkv.Session: turns that go on from one another, however an answer ends, and nothing lost on
the way."""

import dataclasses
import gc
import inspect
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

import morphkv

pytest.importorskip("morphkv._engine", reason="the package was built without llama.cpp")
MODEL = os.environ.get("MORPHKV_TEST_MODEL", "")
pytestmark = pytest.mark.skipif(not MODEL, reason="MORPHKV_TEST_MODEL names no model")

ROOT = pathlib.Path(__file__).parents[2]
DEMO = (ROOT / "examples/demo_prompt.txt").read_text()
CODE = "4817"
STORY = "Once upon a time there was a small harbour town, and in it a lamp that"
LONG = "The ferry brings letters, bread and rope to the island every morning. " * 60
GREEDY = {"temperature": 0.0}


@pytest.fixture(scope="module")
def shared():
    with morphkv.Session(MODEL, budget=256, threads=1) as session:
        yield session


@pytest.fixture
def session(shared):
    shared.reset()
    return shared


def text_of(session, prompt, **settings):
    return "".join(session.generate(prompt, **{**GREEDY, **settings}))


def user(text):
    return {"role": "user", "content": text}


def test_a_text_is_answered_part_by_part_and_the_stats_tell_of_it(session):
    assert session.stats.finish_reason is None and session.stats.tokens_seen == 0
    parts = list(session.generate(STORY, max_tokens=12, **GREEDY))
    stats = session.stats
    assert len(parts) > 6 and all(parts)
    assert stats.generated_tokens == 12 and stats.finish_reason == "length"
    assert stats.tokens_seen == stats.prompt_tokens + 11  # the last one asked nothing
    assert stats.rows_kept == stats.tokens_seen and stats.rows_evicted == 0
    assert stats.reused_tokens == 0 and stats.kv_bytes_allocated > 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.rows_kept = 1


def test_the_same_seed_gives_the_same_text(session):
    first = "".join(session.generate(STORY, max_tokens=20, seed=7))
    session.reset()
    assert "".join(session.generate(STORY, max_tokens=20, seed=7)) == first
    session.reset()
    assert "".join(session.generate(STORY, max_tokens=20, seed=8)) != first


def test_an_answer_in_two_parts_is_the_answer_in_one(session):
    whole = text_of(session, STORY, max_tokens=24)
    session.reset()
    first = text_of(session, STORY, max_tokens=10)
    prompt = session.stats.prompt_tokens
    rest = text_of(session, "", max_tokens=14)
    assert first + rest == whole
    assert session.stats.prompt_tokens == prompt + 10
    assert session.stats.reused_tokens == prompt + 9


def test_a_text_goes_on_behind_all_there_was(session):
    list(session.generate("The code of the blue locker is 4817.", max_tokens=0))
    seen = session.stats.tokens_seen
    answer = text_of(session, " Again: the code of the blue locker is", max_tokens=5)
    assert session.stats.reused_tokens == seen
    assert CODE in answer


def test_memory_stays_within_the_budget_however_long_the_text(session):
    reserved = session.stats.kv_bytes_allocated
    for _ in range(3):
        text_of(session, LONG, max_tokens=4)
        stats = session.stats
        assert stats.rows_kept <= 256
        assert stats.rows_kept + stats.rows_evicted == stats.tokens_seen
    assert stats.tokens_seen > 2000 and stats.kv_bytes_allocated == reserved


def test_a_chat_goes_on_from_what_was_seen(session):
    chat = [user("What is the capital of France? Answer in one sentence.")]
    chat.append({"role": "assistant", "content": text_of(session, chat, max_tokens=60)})
    assert "Paris" in chat[-1]["content"] and session.stats.finish_reason == "stop"
    seen = session.stats.tokens_seen
    chat.append(user("Say that again."))
    answer = text_of(session, chat, max_tokens=20)
    assert session.stats.reused_tokens == seen
    session.reset()
    assert text_of(session, chat, max_tokens=20) == answer
    assert session.stats.reused_tokens == 0


def test_a_sampled_chat_is_reused_even_where_its_tokens_are_not_the_tokenizers(session):
    chat = [user("Invent three names for a boat.")]
    for turn in range(4):
        answer = "".join(session.generate(chat, temperature=1.5, seed=turn, max_tokens=30))
        if turn > 0:
            assert session.stats.reused_tokens >= seen
        seen = session.stats.tokens_seen
        chat += [{"role": "assistant", "content": answer}, user("Three more.")]


def test_another_chat_starts_empty_and_is_answered_as_by_a_new_session(session):
    alone = text_of(session, [user("Name a colour.")], max_tokens=12)
    session.reset()
    text_of(session, [user("Tell me about ships.")], max_tokens=12)
    assert text_of(session, [user("Name a colour.")], max_tokens=12) == alone
    assert session.stats.reused_tokens == 0


def test_guided_reading_finds_a_code_that_the_most_recent_rows_have_lost(session):
    assert CODE in text_of(session, [user(DEMO)], max_tokens=64)
    assert session.stats.rows_evicted > 1000
    with morphkv.Session(MODEL, budget=256, policy="streaming", threads=1) as recent:
        assert CODE not in text_of(recent, [user(DEMO)], max_tokens=64)


def test_a_guide_says_what_to_look_for_before_the_question_is_there(session):
    text, _, _ = DEMO.rpartition("\n\n")
    guide = (
        "\n\nQuestion: Which code opens the blue locker?"
        "\nAnswer: The blue locker opens with the code"
    )

    def asked_later(**reading):
        session.reset()
        list(session.generate(text, max_tokens=0, **reading))
        return text_of(session, guide, max_tokens=6, prefill="stream")

    assert CODE in asked_later(guides=[guide])
    assert CODE in asked_later(guides=guide)
    assert CODE not in asked_later(prefill="stream")


def test_stop_texts_are_never_shown_also_when_they_span_tokens(session):
    whole = text_of(session, STORY, max_tokens=40)
    stop = whole[30:47]
    assert whole.index(stop) == 30
    session.reset()
    parts = list(session.generate(STORY, max_tokens=40, stop=[stop, "never there"], **GREEDY))
    assert "".join(parts) == whole[:30]
    assert session.stats.finish_reason == "stop_text"
    assert 3 < session.stats.generated_tokens < 40
    session.reset()
    assert text_of(session, STORY, max_tokens=40, stop=stop) == whole[:30]
    # What may have been the beginning of a stop text is shown when it was none.
    session.reset()
    assert text_of(session, STORY, max_tokens=40, stop=whole[-4:] + "#") == whole


def test_parts_are_whole_characters(session):
    face = "\N{GRINNING FACE}"  # three tokens
    assert list(session.generate(face * 8, max_tokens=12, **GREEDY)) == [face] * 4
    # A character that was cut is shown as one that is none; the answer goes on all the same.
    assert list(session.generate("", max_tokens=2, **GREEDY)) == ["\N{REPLACEMENT CHARACTER}"]
    assert session.stats.generated_tokens == 2


@pytest.mark.parametrize("how", ["break", "close", "with", "forget"])
def test_an_abandoned_answer_leaves_the_session_usable_and_what_was_shown_seen(session, how):
    whole = text_of(session, STORY, max_tokens=24)
    session.reset()
    shown = []
    if how == "break":
        for part in session.generate(STORY, max_tokens=24, **GREEDY):
            shown.append(part)
            if len(shown) == 5:
                break
    else:
        answer = session.generate(STORY, max_tokens=24, **GREEDY)
        shown = [next(answer) for _ in range(5)]
        if how == "close":
            answer.close()
            answer.close()
            assert list(answer) == []
        elif how == "with":
            with answer:
                pass
        else:
            del answer
            gc.collect()
    assert session.stats.finish_reason == "interrupted"
    rest = text_of(session, "", max_tokens=24 - session.stats.generated_tokens)
    assert "".join(shown) + rest == whole


def test_an_answer_that_was_never_asked_for_leaves_an_empty_session(session):
    session.generate(STORY).close()
    assert session.stats.tokens_seen == 0
    text_of(session, STORY, max_tokens=2)


def test_one_answer_at_a_time(session, tmp_path):
    answer = session.generate(STORY, max_tokens=8, **GREEDY)
    first = next(answer)
    for call in (
        lambda: session.generate("more"),
        lambda: session.save(tmp_path / "s"),
        lambda: session.load(__file__),
    ):
        with pytest.raises(RuntimeError, match="read it to its end, or close"):
            call()
    assert list(tmp_path.iterdir()) == []
    rest = "".join(answer)
    session.reset()
    assert text_of(session, STORY, max_tokens=8) == first + rest
    answer = session.generate("more")
    session.reset()  # ends it
    assert list(answer) == [] and session.stats.tokens_seen == 0


def test_ctrl_c_ends_the_answer_within_a_step_and_not_the_session(session):
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    began = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        for _ in session.generate(STORY, max_tokens=4000, ignore_eos=True):
            pass
    assert time.perf_counter() - began < 10
    timer.join()
    assert session.stats.finish_reason == "interrupted" and session.stats.tokens_seen > 0
    text_of(session, "", max_tokens=2)


def test_ctrl_c_while_a_prompt_is_read_leaves_an_empty_session(session):
    answer = session.generate(LONG * 5, max_tokens=1)
    signals = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    signals.start()
    with pytest.raises(KeyboardInterrupt):
        next(answer)
    signals.join()
    assert session.stats.tokens_seen == 0 and list(answer) == []
    text_of(session, STORY, max_tokens=2)


def test_a_second_thread_is_refused_and_others_run_meanwhile(session):
    answer = session.generate(LONG, max_tokens=2, **GREEDY)
    inside = threading.Event()
    errors = []

    def intrude():
        inside.wait()
        while session.stats.finish_reason is None:
            try:
                next(answer)
            except RuntimeError as error:
                errors.append(str(error))
            except StopIteration:
                return
            time.sleep(0.001)

    thread = threading.Thread(target=intrude)
    thread.start()
    inside.set()
    own = 0
    while session.stats.finish_reason is None:
        try:
            next(answer, None)
        except RuntimeError:
            own += 1
    thread.join()
    assert len(errors) + own >= 5 and all("one thread at a time" in error for error in errors)
    assert session.stats.finish_reason == "length" and session.stats.generated_tokens == 2


def test_a_session_may_be_handed_from_thread_to_thread(session):
    texts = []
    for _ in range(2):
        session.reset()
        work = threading.Thread(target=lambda: texts.append(text_of(session, STORY, max_tokens=8)))
        work.start()
        work.join()
    session.reset()
    assert texts == [text_of(session, STORY, max_tokens=8)] * 2


SAVED = """
import sys, morphkv
with morphkv.Session(sys.argv[1], budget=256, threads=1) as session:
    session.load(sys.argv[2])
    print(session.stats.tokens_seen)
    print("".join(session.generate(" Then", max_tokens=16, temperature=0)), end="")
    print("\\n", session.stats.reused_tokens, sep="", end="")
"""


def test_a_saved_session_goes_on_in_a_new_process(session, tmp_path):
    path = tmp_path / "letters.session"
    text_of(session, LONG[:600], max_tokens=6)
    session.save(path)
    seen = session.stats.tokens_seen
    assert seen == session.stats.prompt_tokens + 5  # the last token is text, and asked nothing
    rest = text_of(session, " Then", max_tokens=16)
    done = subprocess.run(
        [sys.executable, "-c", SAVED, MODEL, path], capture_output=True, text=True, timeout=600
    )
    assert done.stderr == "" and done.returncode == 0
    assert done.stdout == f"{seen}\n{rest}\n{seen}"
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_chat_is_reused_after_loading(session, tmp_path):
    chat = [user("What is the capital of France?")]
    chat.append({"role": "assistant", "content": text_of(session, chat, max_tokens=60)})
    session.save(tmp_path / "chat")
    seen = session.stats.tokens_seen
    session.reset()
    session.load(tmp_path / "chat")
    text_of(session, [*chat, user("And of Italy?")], max_tokens=4)
    assert session.stats.reused_tokens == seen


def test_a_damaged_file_is_refused_and_the_session_goes_on(session, tmp_path):
    whole = text_of(session, STORY, max_tokens=16)
    session.reset()
    first = text_of(session, STORY, max_tokens=8)
    (tmp_path / "bad").write_bytes(b"no session at all")
    with pytest.raises(ValueError):
        session.load(tmp_path / "bad")
    with pytest.raises(FileNotFoundError):
        session.load(tmp_path / "missing")
    with pytest.raises(OSError):
        session.save(tmp_path / "no" / "folder")
    assert first + text_of(session, "", max_tokens=8) == whole


def test_every_setting_of_the_table_has_its_argument():
    arguments = inspect.signature(morphkv.Session.__init__).parameters
    names = re.findall(r"^\|[^|]*\| `(\w+)` \|", morphkv.settings_table(), re.MULTILINE)
    assert len(names) == 10
    assert set(names) <= set(arguments)


def test_settings_replace_those_of_the_profile():
    with morphkv.Session(
        MODEL, budget=64, profile="paper", window=5, fusion="max", prefill="stream", threads=1
    ) as session:
        assert session.rule == (
            "profile paper, budget 64, n_sink 4, window 5, recent 0, pool 1, fusion max, "
            "queries attention, policy morphkv, seed 0, prefill stream"
        )
        text_of(session, LONG[:800], max_tokens=1)
        assert session.stats.prefill_mode == "stream"
        text_of(session, LONG[:800], max_tokens=1, prefill="whole")
        assert session.stats.prefill_mode == "whole"
        assert session.stats.rows_kept == 64


@pytest.mark.parametrize(
    ("settings", "error", "what"),
    [
        ({"budget": 0}, ValueError, "budget 0"),
        ({"budget": 10**12}, ValueError, "budget 1000000000000 is out of range"),
        ({"budget": 8, "n_sink": 8}, ValueError, "n_sink"),
        ({"profile": "letter"}, ValueError, "document"),
        ({"policy": "best"}, ValueError, "policy 'best'"),
        ({"cache_type_k": "f64"}, ValueError, "cache_type_k 'f64'"),
        ({"threads": -1}, ValueError, "threads -1"),
        ({"pool": 4}, ValueError, "pool 4"),
        ({"fusion": "sum"}, ValueError, "fusion 'sum' is not known: use one of mean, max"),
        ({"policy": "h2o", "prefill": "guided"}, ValueError, "takes no guide"),
        ({"policy": "full"}, ValueError, "evicts nothing"),
        ({"queries": 3}, TypeError, "queries 3: give str"),
        ({"budget": "many"}, TypeError, "budget 'many': give int"),
        ({"window": 2.5}, TypeError, "window 2.5: give int"),
        ({"verbose": "no"}, TypeError, "verbose 'no': give bool"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(settings, error, what):
    with pytest.raises(error, match=what):
        morphkv.Session(MODEL, **settings)


@pytest.mark.parametrize(
    ("prompt", "settings", "error", "what"),
    [
        ("", {}, ValueError, "prompt is empty"),
        ([], {}, ValueError, "no messages"),
        (7, {}, TypeError, "prompt"),
        ([{"role": "user"}], {}, ValueError, "message 0 has the keys"),
        ([user("a"), {"role": "user", "content": 3}], {}, TypeError, "content of message 1"),
        (["text"], {}, TypeError, "message 0"),
        ("a\ud800", {}, ValueError, "half a character at 1"),
        ("a", {"max_tokens": -1}, ValueError, "max_tokens -1"),
        ("a", {"temperature": float("nan")}, ValueError, "temperature"),
        ("a", {"temperature": "hot"}, TypeError, "temperature 'hot': give float"),
        ("a", {"top_p": 2.0}, ValueError, "top.p"),
        ("a", {"seed": -1}, ValueError, "seed -1"),
        ("a", {"seed": 1.5}, TypeError, "seed 1.5: give int"),
        ("a", {"stop": ["x", ""]}, ValueError, "stop text is empty"),
        ("a", {"stop": [3]}, TypeError, "stop: give str"),
        ("a", {"prefill": "fast"}, ValueError, "prefill 'fast' is not known"),
        ("a", {"prefill": "stream", "guides": "x"}, ValueError, "guides are given"),
        ("a", {"guides": [LONG]}, ValueError, "a guide has"),
        (LONG, {"strict": True}, ValueError, "strict"),
        (LONG * 15, {}, ValueError, "8192"),
    ],
)
def test_turns_that_cannot_be_are_refused_and_change_nothing(
    session, prompt, settings, error, what
):
    text_of(session, STORY, max_tokens=4)
    before = session.stats
    if prompt == "":
        session.reset()
        before = session.stats
    with pytest.raises(error, match=what):
        session.generate(prompt, **settings)
    assert session.stats == before
    text_of(session, STORY, max_tokens=2)


def test_files_that_are_no_models_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError):
        morphkv.Session(tmp_path / "missing.gguf")
    with pytest.raises(IsADirectoryError):
        morphkv.Session(tmp_path)
    (tmp_path / "text.gguf").write_text("GGUF, or not")
    with pytest.raises(ValueError, match="text.gguf"):
        morphkv.Session(tmp_path / "text.gguf")


def test_a_closed_session_says_so(tmp_path):
    session = morphkv.Session(MODEL, budget=64, threads=1)
    answer = session.generate(STORY, **GREEDY)
    next(answer)
    session.close()
    session.close()
    for call in (
        lambda: next(answer),
        lambda: session.generate("a"),
        session.reset,
        lambda: session.save(tmp_path / "s"),
    ):
        with pytest.raises(RuntimeError, match="closed"):
            call()
    assert session.stats.finish_reason == "interrupted" and session.stats.generated_tokens > 0


@pytest.mark.parametrize("page", ["README.md", "docs/python.md"])
def test_the_examples_of_the_documentation_run(page, tmp_path, monkeypatch, capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    program = "\n".join(block for block in blocks if "session" in block)
    assert 'morphkv.Session("model.gguf"' in program
    (tmp_path / "model.gguf").symlink_to(MODEL)
    (tmp_path / "report.txt").write_text(DEMO.rpartition("\n\n")[0])
    monkeypatch.chdir(tmp_path)
    exec(compile(program, page, "exec"), {})
    assert capsys.readouterr().out.strip()


def test_the_engine_is_silent_unless_asked():
    program = "import sys, morphkv; morphkv.Session(sys.argv[1], budget=64, verbose={})"
    for verbose in (False, True):
        done = subprocess.run(
            [sys.executable, "-c", program.format(verbose), MODEL],
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0 and done.stdout == ""
        assert (done.stderr != "") == verbose


def test_without_the_engine_session_says_how_to_build_it():
    program = """
import sys
sys.modules["morphkv._engine"] = None
import morphkv
morphkv.CacheConfig()
try:
    morphkv.Session
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "-C cmake.define.MORPHKV_LLAMA_CPP=ON" in done.stdout, done.stderr
