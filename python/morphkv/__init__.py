"""Constant-size KV caches for LLM inference.

CacheConfig, MorphKVCache and CacheBuilder work on the arrays of numpy, MLX, torch (CPU) and all
others that speak DLPack or the buffer protocol; morphkv.mlx fits mlx_lm. Session runs GGUF models
through llama.cpp, where the package was built with it.
"""

from typing import TYPE_CHECKING, Any

from ._core import (
    CacheBuilder,
    CacheConfig,
    MorphKVCache,
    Profile,
    find_profile,
    profiles,
    settings_table,
)
from ._core import version as __version__

if TYPE_CHECKING:
    from .session import Answer, Session, SessionStats

__all__ = [
    "CacheBuilder",
    "CacheConfig",
    "MorphKVCache",
    "Profile",
    "__version__",
    "find_profile",
    "profiles",
    "settings_table",
]


def __getattr__(name: str) -> Any:
    # Not at import: without the engine all but these is there.
    if name in ("Answer", "Session", "SessionStats"):
        from . import session

        return getattr(session, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
