"""Session: a text or a chat with a GGUF model, in constant memory however long it gets."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

try:
    from ._engine import Engine, EngineOptions, TurnOptions
except ModuleNotFoundError as error:
    if error.name != f"{__package__}._engine":
        raise
    raise ImportError(
        "morphkv.Session needs llama.cpp, and this morphkv was built without: in its source "
        "directory run `pip install . -C cmake.define.MORPHKV_LLAMA_CPP=ON`",
        name=error.name,
    ) from None

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class SessionStats:
    """Where a session stands. Rows are those of one KV head."""

    tokens_seen: int
    """Tokens evaluated since the session was empty."""
    rows_kept: int
    rows_evicted: int
    prompt_tokens: int
    """Of the last turn, what it went on from included."""
    reused_tokens: int
    """Of those: seen before, not evaluated again."""
    generated_tokens: int
    """Of the last turn."""
    prefill_mode: str
    """How its prompt was read: 'guided', 'stream', 'whole', or 'at_once' within the budget."""
    finish_reason: str | None
    """Of the last turn: 'stop' (the model ended), 'stop_text', 'length', 'trained_length',
    'interrupted' or 'error'; None while it goes on."""
    kv_bytes_allocated: int
    """Reserved for keys and values when the session was made."""


class Answer(Iterator[str]):
    """The text of an answer, part by part, in whole characters: what Session.generate() returns.

    A part is generated when it is asked for. close(), leaving a `with` block and forgetting the
    object end the answer at once.
    """

    def __init__(self, engine: Engine, turn: int) -> None:
        self._engine = engine
        self._turn = turn
        self._done = False

    def __next__(self) -> str:
        if not self._done:
            try:
                text = self._engine.next(self._turn)
            except KeyboardInterrupt:
                self._done = True
                raise
            if text is not None:
                return text
            self._done = True
        raise StopIteration

    def close(self) -> None:
        """Ends the answer. What was read and generated so far stays seen; a prompt that was not
        yet read to its end leaves the session empty."""
        if not self._done:
            self._engine.end(self._turn)
            self._done = True

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, RuntimeError):
            self.close()


class Session:
    """One text, or one chat, with a GGUF model; each KV head keeps at most `budget` rows.

    All memory is reserved here. `profile` names the settings (morphkv.profiles()); `n_sink`,
    `window`, `recent`, `pool`, `fusion`, `queries`, `policy`, `seed` and `prefill` replace its own
    (docs/settings.md). `threads`: 0 = one per core.
    `cache_type_k`, `cache_type_v`: f16, q8_0 or q4_0. `n_gpu_layers`: -1 = all, if there is a GPU.
    `verbose` shows llama.cpp's log on standard error, for the whole process.

    OSError for a file that cannot be read; ValueError, which names the value, the limit and the
    fix, for other settings and files that are refused; RuntimeError when the engine fails.

    A session may be handed from thread to thread, but only one may use it at a time: RuntimeError
    for the other.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        budget: int = 512,
        *,
        profile: str = "document",
        n_sink: int | None = None,
        window: int | None = None,
        recent: int | None = None,
        pool: int | None = None,
        fusion: str | None = None,
        queries: str | None = None,
        policy: str | None = None,
        seed: int | None = None,
        prefill: str | None = None,
        threads: int = 0,
        cache_type_k: str = "f16",
        cache_type_v: str = "f16",
        n_gpu_layers: int = -1,
        allow_past_training: bool = False,
        verbose: bool = False,
    ) -> None:
        settings = {
            "budget": budget,
            "n_sink": n_sink,
            "window": window,
            "recent": recent,
            "pool": pool,
            "fusion": fusion,
            "queries": queries,
            "policy": policy,
            "seed": seed,
            "prefill": prefill,
        }
        options = EngineOptions()
        _assign(
            options,
            profile=profile,
            settings={name: value for name, value in settings.items() if value is not None},
            threads=threads,
            cache_type_k=cache_type_k,
            cache_type_v=cache_type_v,
            n_gpu_layers=n_gpu_layers,
            allow_past_training=allow_past_training,
            verbose=verbose,
        )
        path = os.fspath(model)
        with open(path, "rb"):
            pass
        self._engine = Engine(path, options)

    def generate(
        self,
        prompt: str | Sequence[Message],
        *,
        max_tokens: int | None = 256,
        temperature: float = 0.8,
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        repeat_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        seed: int | None = None,
        stop: str | Iterable[str] | None = None,
        guides: str | Iterable[str] | None = None,
        prefill: str | None = None,
        ignore_eos: bool = False,
        strict: bool = False,
    ) -> Answer:
        """Reads the prompt and answers it: an iterator of the answer's text.

        A text goes on behind all that the session has seen ('' with an answer that was cut). A
        list of messages, {"role": ..., "content": ...}, is the whole chat in the model's own
        template: the session goes on from what it has seen if the chat begins with exactly that,
        else it starts empty; stats.reused_tokens tells. The session is the caller's again when
        the answer is at its end or closed; until then another generate() is a RuntimeError.

        max_tokens: None = until the model ends. temperature: 0 = always the likeliest token. seed:
        None = a random one. stop: texts that end the answer and are not part of it; the session
        has seen them. guides: what to look for while a prompt beyond the budget is read, in place
        of the prompt's own end. prefill: how that is read, in place of the session's own way: guided,
        stream (without guides) or whole (in a larger cache, then evicted from). strict: ValueError in place of
        evicting, and the answer ends where the budget does.

        Ctrl-C ends the answer within one step.
        """
        options = TurnOptions()
        _assign(
            options,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repeat_penalty=repeat_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            seed=seed,
            stop=_texts("stop", stop),
            guides=_texts("guides", guides),
            prefill=prefill,
            ignore_eos=ignore_eos,
            strict=strict,
        )
        text = _text("prompt", prompt) if isinstance(prompt, str) else _messages(prompt)
        return Answer(self._engine, self._engine.begin(text, options))

    @property
    def stats(self) -> SessionStats:
        """Where the session stands; at any time."""
        return SessionStats(**self._engine.stats())

    @property
    def rule(self) -> str:
        """The settings that the session runs by, in words."""
        return self._engine.rule()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes all that the session is to a file: at once or not at all. `morphkv run`, `chat`
        and `serve` read it as well."""
        self._engine.save(os.fspath(path))

    def load(self, path: str | os.PathLike[str]) -> None:
        """Goes on from a file that save() wrote, or `morphkv run`, `chat` or `serve`, with its rule
        (until reset()).

        ValueError for a file that is damaged, of another model or version, or of a larger budget;
        the session is as before then.
        """
        path = os.fspath(path)
        with open(path, "rb"):
            pass
        self._engine.load(path)

    def reset(self) -> None:
        """Forgets everything seen; ends an answer that is still being generated."""
        self._engine.reset()

    def close(self) -> None:
        """Gives all memory back; of the session only `stats` remains."""
        self._engine.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _assign(options: EngineOptions | TurnOptions, **values: Any) -> None:
    for name, value in values.items():
        try:
            setattr(options, name, value)
        except TypeError:
            default = getattr(options, name)
            kind = "int" if default is None else type(default).__name__
            kind = "str" if name == "prefill" else kind
            raise TypeError(f"{name} {value!r}: give {kind}") from None


def _text(name: str, text: object) -> str:
    if not isinstance(text, str):
        raise TypeError(f"{name}: give str, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} has half a character at {error.start}: {error.reason}") from None
    return text


def _texts(name: str, texts: str | Iterable[str] | None) -> list[str]:
    if texts is None:
        return []
    return [_text(name, text) for text in ([texts] if isinstance(texts, str) else texts)]


def _messages(messages: Sequence[Message]) -> list[tuple[str, str]]:
    if not isinstance(messages, Sequence):
        raise TypeError(f"prompt: give str or a list of messages, not {type(messages).__name__}")
    pairs = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise TypeError(f"message {i}: give a dict of role and content, not {message!r}")
        if set(message) != {"role", "content"}:
            raise ValueError(f"message {i} has the keys {sorted(message)}: give role and content")
        pairs.append(
            (
                _text(f"role of message {i}", message["role"]),
                _text(f"content of message {i}", message["content"]),
            )
        )
    if not pairs:
        raise ValueError("there are no messages: give at least one")
    return pairs
