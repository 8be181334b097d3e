"""google-tunix: GRPOLearner over an RLCluster with its own sampler ("vanilla"), adapters by qwix, all on one mesh.

The whole batch is one micro-batch unless the race says otherwise, and nothing is rematerialised, as it comes. Its model
knows one global layer in six and no other pattern, so of the tiny model it makes all four layers local.
"""

from __future__ import annotations

import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import qwix
from flax import nnx
from race import LEARNING_RATE, Race, reward
from transformers import AutoTokenizer
from tunix.models.gemma3 import model as gemma3
from tunix.models.gemma3.params_safetensors import create_model_from_safe_tensors
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

ADAPTED = ".*q_einsum|.*kv_einsum|.*attn_vec_einsum|.*gate_proj|.*up_proj|.*down_proj"
NO_TOKEN = -1


class Timed(RLCluster):
    """Takes the time of every rollout, counts what was drawn, and waits for every update."""

    race: Race
    rollout_seconds, tokens = 0.0, 0

    def generate(self, *args, **kwargs):
        started = time.perf_counter()
        output = super().generate(*args, **kwargs)  # ends with the tokens on the host
        self.rollout_seconds += time.perf_counter() - started
        self.tokens += sum(map(len, output.tokens))
        return output

    def update_actor(self, *args, **kwargs):
        before = self.actor_trainer.train_steps
        super().update_actor(*args, **kwargs)
        jax.block_until_ready(nnx.state(self.actor_trainer.model, nnx.LoRAParam))
        if self.actor_trainer.train_steps > before:  # else more micro-batches of the step are to come
            peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
            self.race.step_done(self.rollout_seconds, self.tokens, peak and peak / 1e9)
            self.rollout_seconds, self.tokens = 0.0, 0


def chance(prompts: list, completions: list, **_: object) -> list[float]:
    return [reward() for _ in completions]


def load(race: Race, mesh: jax.sharding.Mesh) -> nnx.Module:
    numbers = json.loads((race.checkpoint / "config.json").read_text())
    config = gemma3.ModelConfig(
        num_layers=numbers["num_hidden_layers"],
        num_embed=numbers["vocab_size"],
        embed_dim=numbers["hidden_size"],
        hidden_dim=numbers["intermediate_size"],
        num_heads=numbers["num_attention_heads"],
        head_dim=numbers["head_dim"],
        num_kv_heads=numbers["num_key_value_heads"],
        sliding_window_size=numbers["sliding_window"],
        global_base_frequency=1_000_000,
        param_dtype=jnp.dtype(race.dtype),
    )
    return create_model_from_safe_tensors(str(race.checkpoint), config, mesh, jnp.dtype(race.dtype))


def adapted(base: nnx.Module, race: Race) -> nnx.Module:
    """The policy; on a mesh of one device it need not be sharded, and so shares its base with the reference."""
    provider = qwix.LoraProvider(module_path=ADAPTED, rank=race.rank, alpha=float(race.rank))
    return qwix.apply_lora_to_model(base, provider, **base.get_model_input(), rngs=nnx.Rngs(0))


def settings(race: Race, mesh: jax.sharding.Mesh) -> ClusterConfig:
    training = RLTrainingConfig(
        actor_optimizer=optax.adamw(LEARNING_RATE),
        eval_every_n_steps=race.steps + 1,
        max_steps=race.steps,
        mini_batch_size=race.prompts,
        train_micro_batch_size=race.micro_batch or race.prompts,
        rollout_micro_batch_size=race.prompts,
        compute_logps_micro_batch_size=race.micro_batch or race.prompts,
    )
    rollout = RolloutConfig(
        max_tokens_to_generate=race.completion_length,
        max_prompt_length=race.prompt_length,
        kv_cache_size=race.prompt_length + race.completion_length,
        temperature=race.temperature,
        top_p=1.0,
        top_k=race.top_k,
        eos_tokens=[NO_TOKEN],
    )
    roles = dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), mesh)
    return ClusterConfig(role_to_mesh=roles, training_config=training, rollout_config=rollout)


def main() -> None:
    race = Race.given()
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    base = load(race, mesh)
    tokenizer = AutoTokenizer.from_pretrained(race.checkpoint)
    cluster = Timed(actor=adapted(base, race), reference=base, tokenizer=tokenizer, cluster_config=settings(race, mesh))
    cluster.race = race
    learner = GRPOLearner(cluster, GRPOConfig(num_generations=race.generations, beta=race.beta), chance)
    texts = np.array(race.prompt_texts())[: race.steps * race.prompts]
    learner.train([{"prompts": batch} for batch in texts.reshape(race.steps, race.prompts)])


if __name__ == "__main__":
    main()
