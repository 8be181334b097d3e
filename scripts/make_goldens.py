"""Makes the goldens that our numbers are tested against, by code we did not write: transformers' models of each family,
PEFT's adapters on Gemma 3, torch's AdamW, transformers' cosine schedule and TRL's GRPO loss.

    python scripts/make_goldens.py                         (needs the extra `parity`; overwrites tests/golden)
    python scripts/make_goldens.py --seed 7 --folder DIR   (fresh ones, as `make parity` does)
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)
from transformers.optimization import get_cosine_with_min_lr_schedule_with_warmup
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

REPOSITORY = Path(__file__).parents[1]
PROMPT, COMPLETION, NEW_TOKENS = 14, 10, 12
PADDING = (0, 5, 11)  # of each row, on the left
# learning rate, beta 1, beta 2, eps, weight decay, largest norm of the gradient
OPTIMIZERS = (
    (1e-3, 0.9, 0.999, 1e-8, 0.01, 0.1),
    (3e-2, 0.9, 0.999, 1e-8, 0.0, 1e9),
    (1e-3, 0.5, 0.95, 1e-8, 0.01, 1.0),
    (1e-3, 0.9, 0.999, 1e-1, 0.01, 1.0),
    (1e-2, 0.9, 0.99, 1e-6, 0.3, 0.01),
    (1e-2, 0.0, 0.0, 1e-3, 0.1, 5.0),
)
OPTIMIZER_STEPS, RECORDED = 100, (1, 10, 100)
# peak, warm-up steps, total steps, smallest rate
SCHEDULES = ((3e-6, 10, 100, 1e-7), (1e-3, 0, 30, 0.0), (5e-5, 7, 53, 5e-5), (1e-4, 20, 21, 1e-6))
# epsilon, beta, temperature
OBJECTIVES = ((0.2, 0.04, 1.0), (0.1, 0.0, 0.9), (0.02, 0.5, 1.3))
BASE = {"epsilon": 0.2, "epsilon_high": 0.3, "delta": None, "beta": 0.1, "kl_correction": False, "correction": False}
# Our objective, TRL's loss, its kind of ratio, and what differs from BASE
LOSSES = (
    ("grpo", "grpo", "token", {}),
    ("grpo", "grpo", "token", {"delta": 1.4}),
    ("grpo", "grpo", "token", {"kl_correction": True}),
    ("grpo", "grpo", "token", {"correction": True}),
    ("dr_grpo", "dr_grpo", "token", {}),
    ("bnpo", "bnpo", "token", {"beta": 0.0}),
    ("dapo", "dapo", "token", {"beta": 0.0}),
    ("gspo", "grpo", "sequence", {}),
    ("gspo", "grpo", "sequence", {"kl_correction": True, "epsilon": 0.05, "epsilon_high": 0.06}),
    ("cispo", "cispo", "token", {}),
    ("sapo", "sapo", "token", {}),
    ("rloo", "rloo", "sequence", {"beta": 0.0, "epsilon_high": 0.2}),
)
# Kinds of adapters: where they are, and what differs from LoRA of rank 4
ALL_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS = {
    "lora": (ALL_MODULES, {}),
    "rslora": (["q_proj", "v_proj", "down_proj"], {"use_rslora": True}),
    "dora": (ALL_MODULES, {"use_dora": True}),
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# Models of the other families, in what differs from SMALL
SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "max_position_embeddings": 128}
FAMILIES = {
    "llama": (
        LlamaConfig,
        {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    ),
    "llama3": (
        LlamaConfig,
        {"num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True, "rope_parameters": LLAMA3},
    ),
    "qwen2": (Qwen2Config, {"num_key_value_heads": 2, "tie_word_embeddings": False}),
    "qwen3": (Qwen3Config, {"num_key_value_heads": 2, "head_dim": 12, "tie_word_embeddings": True}),
}
LLAMA3 |= {"original_max_position_embeddings": 32, "rope_theta": 500.0}
GRADIENTS = (
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.2.mlp.down_proj.weight",
    "model.layers.1.input_layernorm.weight",
)


def make_model(folder: Path, seed: int) -> Gemma3ForCausalLM:
    """A small random Gemma 3 with every feature of the large ones, saved by transformers in bfloat16, used in float32."""
    torch.manual_seed(seed)
    config = Gemma3TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        query_pre_attn_scalar=12,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        max_position_embeddings=128,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    model = Gemma3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.3 if "norm" in name else parameter.shape[-1] ** -0.5)
    model.to(torch.bfloat16).save_pretrained(folder)
    return Gemma3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def make_families(folder: Path, seed: int) -> None:
    """Small random models of the other families, saved by transformers in bfloat16; logits and greedy continuations."""
    for name, (kind, differing) in FAMILIES.items():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(kind(**SMALL | differing)).eval()
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                norm = "norm" in parameter_name
                parameter.normal_(float(norm), 0.3 if norm or "bias" in parameter_name else parameter.shape[-1] ** -0.5)
        model.to(torch.bfloat16).save_pretrained(folder / name)
        loaded = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32).eval()
        make_logits(folder / name, loaded, np.random.default_rng(seed))


def make_logits(folder: Path, model: Gemma3ForCausalLM, rng: np.random.Generator) -> None:
    tokens = rng.integers(3, 64, (len(PADDING), PROMPT + COMPLETION))
    mask = np.arange(tokens.shape[1]) >= np.array(PADDING)[:, None]
    tokens[~mask] = 0
    ids, attention = torch.tensor(tokens), torch.tensor(mask.astype(int))
    positions = (attention.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(ids, attention_mask=attention, position_ids=positions, use_cache=False).logits
        greedy = model.generate(
            ids, attention_mask=attention, do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=None, suppress_tokens=[0]
        )
    np.savez_compressed(
        folder / "logits.npz", tokens=tokens, mask=mask, logits=logits.numpy(), greedy=greedy[:, ids.shape[1] :].numpy()
    )


def make_adapters(folder: Path, seed: int) -> None:
    """Adapters of each kind as PEFT saves them, with noise for what they have learnt; logits, and the gradient of their
    product with a random array, by the names of the adapters' tensors.
    """
    given = np.load(folder / "logits.npz")
    ids, attention = torch.tensor(given["tokens"]), torch.tensor(given["mask"].astype(int))
    positions = (attention.cumsum(-1) - 1).clamp(min=0)
    for kind, (modules, differing) in ADAPTERS.items():
        torch.manual_seed(seed)
        base = Gemma3ForCausalLM.from_pretrained(folder / "gemma3", dtype=torch.float32).eval()
        config = LoraConfig(r=4, lora_alpha=6, target_modules=modules, task_type="CAUSAL_LM", **differing)
        model = get_peft_model(base, config).eval()
        model.peft_config["default"].base_model_name_or_path = "gemma3"
        learnt = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        with torch.no_grad():
            for parameter in learnt.values():
                parameter += torch.randn_like(parameter) * 0.1  # magnitudes are about one
        logits = model(ids, attention_mask=attention, position_ids=positions, use_cache=False).logits
        cotangent = torch.randn_like(logits) * attention[..., None]
        (logits * cotangent).sum().backward()
        model.save_pretrained(folder / kind)
        (folder / kind / "README.md").unlink()
        saved = {name.replace(".default", "").replace("vector.weight", "vector"): x for name, x in learnt.items()}
        gradients = {name: parameter.grad.numpy() for name, parameter in saved.items()}
        arrays = {"logits": logits.detach().numpy(), "cotangent": cotangent.numpy()}
        np.savez_compressed(folder / kind / "golden.npz", **arrays, **gradients)


def make_optimizer(folder: Path, rng: np.random.Generator) -> None:
    start = rng.normal(size=24).astype(np.float32)
    gradients = (rng.normal(size=(OPTIMIZER_STEPS, 24)) * np.exp(rng.normal(size=(OPTIMIZER_STEPS, 1)))).astype(np.float32)
    trajectories = []
    for rate, beta1, beta2, eps, decay, largest in OPTIMIZERS:
        parameter = torch.nn.Parameter(torch.tensor(start))
        optimizer = torch.optim.AdamW([parameter], lr=rate, betas=(beta1, beta2), eps=eps, weight_decay=decay)
        seen = []
        for step, gradient in enumerate(gradients, 1):
            parameter.grad = torch.tensor(gradient)
            torch.nn.utils.clip_grad_norm_([parameter], largest)
            optimizer.step()
            if step in RECORDED:
                seen.append(parameter.detach().numpy().copy())
        trajectories.append(seen)
    np.savez_compressed(
        folder / "optimizer.npz",
        start=start,
        gradients=gradients,
        settings=np.array(OPTIMIZERS),
        recorded=np.array(RECORDED),
        trajectories=np.array(trajectories),
    )


def make_schedule(folder: Path) -> None:
    """Rates at t = 0, 1, 2, ...: transformers uses that of t - 1 for update t, we that of t."""
    rates = {}
    for index, (peak, warmup, total, smallest) in enumerate(SCHEDULES):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
        schedule = get_cosine_with_min_lr_schedule_with_warmup(optimizer, warmup, total, min_lr=smallest)
        rates[f"rates_{index}"] = np.array([peak * schedule.lr_lambdas[0](t) for t in range(total + 1)])
    np.savez_compressed(folder / "schedule.npz", settings=np.array(SCHEDULES), **rates)


def make_objective(folder: Path, model: Gemma3ForCausalLM, rng: np.random.Generator) -> None:
    """Loss and gradients of TRL's trainer on two prompts with two completions each, unequal in length."""
    prompts = np.repeat(rng.integers(3, 64, (2, PROMPT)), 2, axis=0)
    prompt_mask = np.arange(PROMPT) >= np.array([0, 0, 4, 4])[:, None]
    prompts[~prompt_mask] = 0
    completions = rng.integers(3, 64, (4, COMPLETION))
    mask = np.arange(COMPLETION) < np.array([10, 3, 7, 1])[:, None]
    completions[~mask] = 0
    near = rng.normal(-4.2, 0.3, (2, 4, COMPLETION)).astype(np.float32)
    batch = {
        "prompt_ids": prompts,
        "prompt_mask": prompt_mask.astype(int),
        "completion_ids": completions,
        "completion_mask": mask.astype(int),
        "advantages": np.array([1.2, -0.8, 0.4, -1.5], np.float32),
        "old_per_token_logps": near[0],
        "ref_per_token_logps": near[1],
    }
    losses, gradients = [], {name: [] for name in GRADIENTS}
    for epsilon, beta, temperature in OBJECTIVES:
        trainer = _trainer(folder, model, epsilon, beta, temperature)
        model.eval().zero_grad()
        loss = trainer._compute_loss(model, {key: torch.tensor(value) for key, value in batch.items()})
        loss.backward()
        losses.append(loss.item())
        for name, parameter in model.named_parameters():
            if name in GRADIENTS:
                gradients[name].append(parameter.grad.numpy().copy())
    kept = {name: np.array(value, np.float32) for name, value in gradients.items()}
    np.savez_compressed(folder / "objective.npz", settings=np.array(OBJECTIVES), losses=np.array(losses), **batch, **kept)


def make_losses(folder: Path, model: Gemma3ForCausalLM, rng: np.random.Generator) -> None:
    """Losses of TRL's trainers and their gradients by the tokens' log-probabilities, which stand in for the model's."""
    mask = np.arange(COMPLETION) < np.array([10, 3, 7, 1])[:, None]
    old = rng.normal(-2.0, 0.5, mask.shape).astype(np.float32)
    new, reference = (old + rng.normal(0, scale, mask.shape).astype(np.float32) for scale in (0.25, 0.4))
    drift = rng.normal(0, 0.2, mask.shape).astype(np.float32)  # of the trainer from the sampler
    advantages = np.array([1.2, -0.8, 0.4, -1.5], np.float32)
    grpo = _trainer(folder, model, 0.2, 0.1, 1.0)
    rloo = _trainer(folder, model, 0.2, 0.0, 1.0, RLOOTrainer, RLOOConfig)
    losses, gradients, settings = [], [], []
    for ours, loss_type, level, changes in LOSSES:
        of = BASE | changes
        trainer = rloo if loss_type == "rloo" else grpo
        trainer.loss_type, trainer.importance_sampling_level = loss_type, level
        cap = 1 + of["epsilon_high"]  # of cispo, which TRL gives as such
        trainer.epsilon_low, trainer.epsilon_high = of["epsilon"], cap if ours == "cispo" else of["epsilon_high"]
        trainer.beta, trainer.args.delta, trainer.args.use_bias_correction_kl = of["beta"], of["delta"], of["kl_correction"]
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = of["correction"]
        trainer.max_completion_length = COMPLETION + 2
        leaf, trained = torch.tensor(new, requires_grad=True), torch.tensor(old + drift if of["correction"] else old)
        trainer._get_per_token_logps_and_entropies = lambda *_, leaf=leaf, **__: (leaf, torch.ones_like(leaf), None)
        ids, marks = torch.ones(mask.shape, dtype=torch.long), torch.tensor(mask.astype(int))
        batch = {"prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": marks}
        batch |= {"advantages": torch.tensor(advantages), "num_items_in_batch": marks.sum()}
        batch |= {"old_per_token_logps": trained, "old_logps": (trained * marks).sum(1)}
        batch |= {"ref_per_token_logps": torch.tensor(reference)}
        batch |= {"importance_sampling_ratio": torch.clamp(torch.exp(torch.tensor(drift)), max=1.1)}
        model.eval()
        loss = trainer._compute_loss(model, batch)
        loss.backward()
        losses.append(loss.item())
        gradients.append(leaf.grad.numpy().copy())
        settings.append(json.dumps({"objective": ours} | of))
    np.savez_compressed(
        folder / "losses.npz",
        settings=np.array(settings),
        losses=np.array(losses),
        gradients=np.array(gradients),
        mask=mask,
        new=new,
        old=old,
        drift=drift,
        reference=reference,
        advantages=advantages,
        longest=COMPLETION + 2,
    )


def _trainer(
    folder: Path,
    model: Gemma3ForCausalLM,
    epsilon: float,
    beta: float,
    temperature: float,
    kind=GRPOTrainer,
    config=GRPOConfig,
):
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(REPOSITORY / "src" / "agent_tunix" / "models" / "tiny" / "tokenizer.json"),
        pad_token="<pad>",
        eos_token="<eos>",
    )
    # The GRPO paper's KL term; TRL's default is DeepSeek-V3.2's.
    own = {"loss_type": "grpo", "use_bias_correction_kl": False} if kind is GRPOTrainer else {}
    arguments = config(
        **own,
        output_dir=str(folder / "trl"),
        epsilon=epsilon,
        beta=beta,
        temperature=temperature,
        num_generations=2,
        per_device_train_batch_size=4,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to="none",
    )
    return kind(
        model=model,
        args=arguments,
        processing_class=tokenizer,
        reward_funcs=lambda completions, **_: [0.0 for _ in completions],
        train_dataset=Dataset.from_list([{"prompt": "1"}]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "tests" / "golden")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(args.seed)
    model = make_model(args.folder / "gemma3", args.seed)
    make_logits(args.folder, model, rng)
    make_families(args.folder / "families", args.seed)
    make_adapters(args.folder, args.seed)
    make_optimizer(args.folder, rng)
    make_schedule(args.folder)
    make_objective(args.folder, model, rng)
    make_losses(args.folder, model, np.random.default_rng(args.seed))


if __name__ == "__main__":
    main()
