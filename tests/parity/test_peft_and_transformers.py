"""What `agent-tunix export` writes, read by transformers and PEFT: logits and greedy completions are as trained."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3Config, Gemma3ForConditionalGeneration

from agent_tunix.config.load import config_text, read_saved, validate
from agent_tunix.config.schema import Config, ExportConfig
from agent_tunix.engine.checkpoint import Checkpoints
from agent_tunix.engine.progress import Progress
from agent_tunix.engine.sampler import Draw, logits, sample
from agent_tunix.engine.update import init_state
from agent_tunix.models import transformer
from agent_tunix.models.checkpoints.hub import find_checkpoint
from agent_tunix.models.checkpoints.loading import load_weights
from agent_tunix.models.checkpoints.peft import write_adapters
from agent_tunix.models.checkpoints.safetensors import read_architecture
from agent_tunix.models.lora import ATTENTION, FEED_FORWARD, init_adapters
from agent_tunix.models.tokenizer import load_tokenizer
from agent_tunix.training import export, loading, rollouts
from agent_tunix.training.data import load_examples, prompt_width
from agent_tunix.types import Prompts

pytestmark = pytest.mark.parity
TRAIN = ["train", "model=gemma3_tiny", "training.num_batches=2", "hydra.run.dir=run"]
STRONG = [
    "optimizer.learning_rate=1e-3",
    "training.max_kl=1000.0",
    "optimizer.warmup_ratio=0",
    "optimizer.max_grad_norm=10",
    "evaluation.num_examples=16",
]


@pytest.fixture
def trained(command, tmp_path):
    assert command(*TRAIN, *STRONG).code == 0
    for form in ("peft", "merged"):
        assert command("export", "run=run", f"format={form}", f"output={form}").code == 0
    return tmp_path


def asked(run):
    return ExportConfig(run=str(run), step=None, format="peft", output=None, dtype="float32")


def test_transformers_and_peft_do_what_was_trained(trained):
    cfg = validate(read_saved(trained / "run" / "config.yaml"), Config)
    model = loading.load_model(cfg)
    adapters, _ = loading.load_trained(str(trained / "run"), cfg, model)
    examples = load_examples(cfg, "test", 32, model.tokenizer, print)
    prompts = rollouts.pad_prompts(examples, prompt_width(examples, 0), model)
    hidden, _ = transformer.forward(model.weights, adapters, model.arch, prompts.tokens_PS, prompts.positions_PS)
    logits = np.asarray(transformer.unembed(model.weights, hidden))
    sampling = loading.training_sampling(cfg, model.tokenizer)
    sampling = type(sampling)(**{**vars(sampling), "greedy": True, "num_generations": 1})
    (drawn,) = sample(model.weights, (Draw(adapters, prompts, jax.random.key(0)),), arch=model.arch, sampling=sampling)

    base = AutoModelForCausalLM.from_pretrained(find_checkpoint(cfg.model.weights), dtype=torch.float32)
    ids, mask = torch.tensor(np.asarray(prompts.tokens_PS)), torch.tensor(np.asarray(prompts.positions_PS) >= 0)
    positions = torch.tensor(np.maximum(prompts.positions_PS, 0))
    with torch.no_grad():
        untrained = base(ids, attention_mask=mask.long(), position_ids=positions).logits.numpy()
    assert np.abs((untrained - logits)[mask.numpy()]).max() > 0.1
    for theirs in (
        PeftModel.from_pretrained(base, trained / "peft"),
        AutoModelForCausalLM.from_pretrained(trained / "merged", dtype="auto"),
    ):
        assert theirs.dtype == torch.float32
        with torch.no_grad():
            found = theirs(input_ids=ids, attention_mask=mask.long(), position_ids=positions).logits.numpy()
            words = theirs.generate(
                input_ids=ids,
                attention_mask=mask.long(),
                do_sample=False,
                max_new_tokens=sampling.max_steps,
                eos_token_id=list(sampling.end_ids),
                pad_token_id=0,
                suppress_tokens=[0],
            )[:, ids.shape[1] :].numpy()
        np.testing.assert_allclose(found[mask.numpy()], logits[mask.numpy()], atol=1e-3)
        np.testing.assert_array_equal(words, np.asarray(drawn.tokens_BC)[:, : words.shape[1]])


def test_exported_tokenizer_writes_the_prompts_we_train_on(trained):
    theirs = AutoTokenizer.from_pretrained(trained / "merged")
    cfg = validate(read_saved(trained / "run" / "config.yaml"), Config)
    example = load_examples(cfg, "test", 1, load_tokenizer(trained / "merged"), print)[0]
    turns = [{"role": "user", "content": example.question}]
    text = theirs.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    assert tuple(theirs(text, add_special_tokens=False).input_ids) == example.prompt_ids


def test_peft_finds_the_text_part_of_a_multimodal_model(tmp_path, trained, goldens):
    """4B, 12B and 27B are published with a vision tower whose modules have the same names."""
    text = read_text_config(goldens / "gemma3")
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8}
    config = Gemma3Config(text_config=text, vision_config={**vision, "patch_size": 4}, mm_tokens_per_image=4)
    torch.manual_seed(0)
    base = Gemma3ForConditionalGeneration(config).float().eval()
    base.save_pretrained(tmp_path / "base")
    shutil.copy(find_checkpoint("package:tiny") / "tokenizer.json", tmp_path / "base")
    arch = read_architecture(tmp_path / "base")

    cfg = validate(read_saved(trained / "run" / "config.yaml"), Config)
    numbers = {key: value for key, value in vars(arch).items() if key != "query_scale"}
    section = cfg.model.model_dump() | {"weights": str(tmp_path / "base"), "lora_module_path": "(q|down)_proj"}
    section["architecture"] = {**numbers, "query_pre_attn_scalar": arch.query_scale**-2}
    cfg = validate({**cfg.model_dump(), "model": section}, Config)
    adapters = init_adapters(jax.random.key(1), arch, ("q_proj", "down_proj"), cfg.model.lora_rank, cfg.model.lora_alpha)
    adapters = type(adapters)(adapters.a, jax.tree.map(lambda b: b + 1e-4, adapters.b), adapters.scale)
    run = tmp_path / "multimodal"
    run.mkdir()
    (run / "config.yaml").write_text(config_text(cfg))
    checkpoints = Checkpoints(run / "checkpoints", 1)
    checkpoints.save(init_state(adapters), Progress())
    checkpoints.close()
    folder = export.run(asked(run), export.Console(quiet=True))

    tokens = np.random.default_rng(0).integers(3, 60, (2, 12))
    weights = load_weights(tmp_path / "base", arch, jnp.float32)
    hidden, _ = transformer.forward(weights, adapters, arch, tokens, np.tile(np.arange(12), (2, 1)))
    with torch.no_grad():
        before = base(input_ids=torch.tensor(tokens)).logits.numpy()
        after = PeftModel.from_pretrained(base, folder)(input_ids=torch.tensor(tokens)).logits.numpy()
    assert np.abs(before - after).max() > 1e-2
    np.testing.assert_allclose(after, transformer.unembed(weights, hidden), atol=1e-4)


@pytest.mark.parametrize(
    "kind", [{}, {"use_rslora": True}, {"use_dora": True}, {"use_rslora": True, "use_dora": True}], ids=str
)
def test_peft_does_what_adapters_of_every_kind_do(tmp_path, goldens, kind):
    arch = read_architecture(goldens / "gemma3")
    weights = load_weights(goldens / "gemma3", arch, jnp.float32)
    over = weights if kind.get("use_dora") else None
    fresh = init_adapters(jax.random.key(1), arch, ATTENTION + FEED_FORWARD, 4, 6.0, kind.get("use_rslora", False), over)
    learnt = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), fresh)
    write_adapters(tmp_path, learnt, 6.0, "the base", multimodal=False, dtype="float32", use_rslora="use_rslora" in kind)
    tokens = np.random.default_rng(0).integers(3, 60, (2, 12))
    prompts = Prompts(jnp.asarray(tokens), jnp.tile(jnp.arange(12), (2, 1)))
    base = AutoModelForCausalLM.from_pretrained(goldens / "gemma3", dtype=torch.float32)
    with torch.no_grad():
        before = base(input_ids=torch.tensor(tokens)).logits.numpy()
        after = PeftModel.from_pretrained(base, tmp_path)(input_ids=torch.tensor(tokens)).logits.numpy()
    assert np.abs(before - after).max() > 1e-2
    np.testing.assert_allclose(after, logits(weights, learnt, prompts, arch=arch), atol=1e-4)


def read_text_config(folder):
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder).to_dict()
