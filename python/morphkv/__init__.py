"""Constant-size KV caches for LLM inference.

CacheConfig, MorphKVCache and CacheBuilder work on the arrays of numpy, MLX, torch (CPU) and all
others that speak DLPack or the buffer protocol; morphkv.mlx fits mlx_lm.
"""

from ._core import CacheBuilder, CacheConfig, MorphKVCache, Profile, find_profile, profiles
from ._core import version as __version__

__all__ = [
    "CacheBuilder",
    "CacheConfig",
    "MorphKVCache",
    "Profile",
    "__version__",
    "find_profile",
    "profiles",
]
