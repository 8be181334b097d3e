from __future__ import annotations

import contextlib
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from agent_tunix.errors import UserError
from agent_tunix.models.checkpoints.peft import CONFIG, TENSORS, base_of, is_peft, read_adapters, settings_of, write_adapters


@pytest.fixture
def folder(adapters, tmp_path):
    write_adapters(tmp_path, adapters, alpha=6.0, base="owner/base", multimodal=False, dtype="float32")
    return tmp_path


@pytest.mark.parametrize("multimodal", [False, True])
def test_adapters_come_back_as_they_were(adapters, arch, tmp_path, multimodal):
    write_adapters(tmp_path, adapters, alpha=6.0, base="owner/base", multimodal=multimodal, dtype="float32")
    assert is_peft(tmp_path)
    assert base_of(tmp_path) == "owner/base"
    found = read_adapters(tmp_path, arch)
    assert found.scale == adapters.scale
    jax.tree.map(np.testing.assert_array_equal, found, adapters)


def test_the_scale_is_by_the_root_of_the_rank_where_the_adapter_says_so(adapters, arch, tmp_path):
    write_adapters(tmp_path, adapters, 6.0, "owner/base", multimodal=False, dtype="float32", use_rslora=True)
    assert json.loads((tmp_path / CONFIG).read_text())["use_rslora"] is True
    assert read_adapters(tmp_path, arch).scale == 6 / 3**0.5


def change(folder, **keys):
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | keys))


@pytest.mark.parametrize("keys", [{"peft_type": "IA3"}, {"alpha_pattern": {"q": 1}}, {"use_qalora": True}])
def test_adapters_that_do_something_else_are_refused(folder, arch, keys):
    change(folder, **keys)
    with pytest.raises(UserError, match=f"{next(iter(keys))} is .*; only"):
        read_adapters(folder, arch)


@pytest.mark.parametrize(("begun", "refused"), [("pissa_niter_16", True), ("gaussian", False), (True, False)])
def test_adapters_of_a_base_that_was_changed_to_begin_with_are_refused(folder, arch, begun, refused):
    change(folder, init_lora_weights=begun)
    with pytest.raises(UserError, match="which changes the base") if refused else contextlib.nullcontext():
        read_adapters(folder, arch)


def test_adapters_that_do_not_fit_are_refused(folder, arch):
    tensors = load_file(folder / TENSORS)
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    for changed, said in (
        ({k: v for k, v in tensors.items() if k != name}, "lora_A of q_proj does not fit the model"),
        (tensors | {name: tensors[name][:, :3]}, "lora_A of q_proj does not fit the model, .* shape .3, 16."),
        (tensors | {"lm_head.lora_A.weight": tensors[name]}, "lm_head.lora_A.weight is an adapter of no module"),
        (tensors | {name: np.full_like(tensors[name], np.nan)}, "other things than finite floating-point numbers"),
        (tensors | {name: tensors[name].astype(np.int32)}, "other things than finite floating-point numbers"),
        ({}, "holds no adapters"),
    ):
        save_file(changed, folder / TENSORS)
        with pytest.raises(UserError, match=said):
            read_adapters(folder, arch)


def test_an_adapter_that_names_no_base_or_cannot_be_read_says_so(folder, arch):
    change(folder, base_model_name_or_path=None)
    with pytest.raises(UserError, match="does not name its base"):
        base_of(folder)
    (folder / TENSORS).write_bytes(b"half")
    with pytest.raises(UserError, match="cannot be read"):
        read_adapters(folder, arch)
    (folder / TENSORS).rename(folder / "adapter_model.bin")
    with pytest.raises(UserError, match="may run code"):
        read_adapters(folder, arch)
    change(folder, lora_alpha=0)
    with pytest.raises(UserError, match="cannot be read: r is 3 and lora_alpha 0"):
        settings_of(folder)
