"""Reading a token of every sequence, whatever reads it; and a cache of prompts, which groups of sequences share.

Axes as in types.py, and: n parts of a cache, as many of each prompt and then as many of each row; R rows, which are
sequences, those of each policy filled up to whole tiles.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

Cache = Any
Read = Callable[[Cache, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Cache]]


class Reading(NamedTuple):
    """A cache, and the function that reads a token of every sequence into one of its slots.

    `read(cache, tokens_B, slot, done_B)` returns the hidden states [B, D] and the cache; rows of sequences that
    are done hold nothing of use. `narrowed(cache, rows_B, slot)` goes on with some of the sequences, as many of each
    policy, from that slot on.
    """

    cache: Cache
    read: Read
    narrowed: Callable[[Cache, jax.Array, ArrayLike], Reading]


@dataclasses.dataclass(frozen=True)
class Held:
    """What such a cache holds: prompts, each of so many parts, and rows."""

    prompts: int
    prompt_parts: int
    rows: int

    def of_rows(self, cache_n: jax.Array, prompt_B: jax.Array, row_R: jax.Array) -> jax.Array:
        """The cache of some of the rows, each with a prompt for itself."""
        shape, shared = cache_n.shape[1:], self.prompts * self.prompt_parts
        prompts, own = cache_n[:shared].reshape(self.prompts, -1, *shape), cache_n[shared:].reshape(self.rows, -1, *shape)
        return jnp.concatenate([prompts[prompt_B].reshape(-1, *shape), own[row_R].reshape(-1, *shape)])


def filled_place(rows_B: jax.Array, sequences: int, rows: int) -> jax.Array:
    """Where sequences lie once those of each policy, so many, have been filled up to so many rows."""
    return rows_B // sequences * rows + rows_B % sequences
