from __future__ import annotations

import itertools

import jax
import numpy as np

from agent_tunix.engine.random_keys import Purpose, step_key


def test_every_seed_step_and_purpose_has_its_own_key():
    keys = [step_key(*which) for which in itertools.product((0, 1, 2**31 - 1), (0, 1, 2, 99), Purpose)]
    assert len({tuple(jax.random.key_data(key).tolist()) for key in keys}) == len(keys) == 3 * 4 * len(Purpose)


def test_a_key_is_a_function_of_its_arguments():
    a, b = (jax.random.uniform(step_key(7, 3, Purpose.ROLLOUT), (4,)) for _ in range(2))
    np.testing.assert_array_equal(a, b)
