"""Writes `stored/`: tiny models of the public references, every tensor random, and their logits.

    python tests/interop/make_references.py FAMILY [CHECKOUT]

FAMILY and the CHECKOUT of its repository: `recurrentgemma`, `lfm2` and `olmo_hybrid` (package transformers,
no checkout), `recurrentgemma_flax` (google-deepmind/recurrentgemma), `safari` (HazyResearch/safari),
`hyenadna` (HazyResearch/hyena-dna), `stripedhyena2` (package vtx, no checkout), `rwkv7` (package rwkv, no
checkout), `rwkv7_transformers` (package flash-linear-attention, no checkout). Needs the extra `interop`,
jaxtyping and typeguard 2.13. What a reference imports but this does not need is replaced by empty modules.
"""

import contextlib
import json
import os
import runpy
import sys
import tempfile
import types
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.torch import save_file

STORED = Path(__file__).parent / "stored"
LENGTHS = (5, 19)
LAST = 19
"""Positions whose logits are stored."""


def randomize(model: torch.nn.Module) -> None:
    """Random values in every parameter; those of norms around 1."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, value in model.named_parameters():
            noise = 0.3 * torch.randn(value.shape, generator=generator)
            is_factor = value.ndim == 1 and ("norm" in name or "ln_f" in name) and not name.endswith("bias")
            value.copy_(noise + 1 if is_factor else noise)


def tokens_of(vocab_size: int, length: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, vocab_size, (1, length))


def recurrentgemma() -> None:
    from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

    config = RecurrentGemmaConfig(
        vocab_size=24,
        hidden_size=16,
        num_hidden_layers=4,
        intermediate_size=48,
        num_attention_heads=2,
        num_key_value_heads=1,
        lru_width=20,
        attention_window_size=6,
    )
    write_transformers("recurrentgemma", RecurrentGemmaForCausalLM(config))


def lfm2() -> None:
    from transformers import Lfm2Config, Lfm2ForCausalLM

    config = Lfm2Config(
        vocab_size=24,
        hidden_size=16,
        num_hidden_layers=3,
        intermediate_size=30,
        block_multiple_of=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        full_attn_idxs=[1],
        max_position_embeddings=64,
    )
    write_transformers("lfm2", Lfm2ForCausalLM(config))


def olmo_hybrid() -> None:
    from transformers import OlmoHybridConfig, OlmoHybridForCausalLM

    config = OlmoHybridConfig(
        vocab_size=24,
        hidden_size=16,
        num_hidden_layers=4,
        intermediate_size=20,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=6,
        linear_value_head_dim=10,
        rope_parameters={"rope_type": "default", "rope_theta": None},
        pad_token_id=None,
        eos_token_id=None,
    )
    write_transformers("olmo_hybrid", OlmoHybridForCausalLM(config))


def write_transformers(family: str, model: Any) -> None:
    model = model.eval()
    randomize(model)
    model.save_pretrained(STORED / family)
    (STORED / family / "generation_config.json").unlink(missing_ok=True)
    tokens = tokens_of(model.config.vocab_size, LENGTHS[1])

    def logits(length: int) -> torch.Tensor:
        return model(torch.as_tensor(tokens[:, :length]), use_cache=False).logits

    write_expected(family, tokens, logits, LENGTHS)


def write_expected(family: str, tokens: np.ndarray, logits: Any, lengths: tuple[int, int]) -> None:
    with torch.no_grad():
        found = {f"logits_{length}": np.asarray(logits(length), np.float32)[:, -LAST:] for length in lengths}
    np.savez_compressed(STORED / family / "expected.npz", tokens=tokens.astype(np.int32), **found)


def write(
    family: str, model: Any, config: dict | None, logits: Any, vocab_size: int, lengths: Any = LENGTHS
) -> None:
    """A model that is not of transformers: its state and config."""
    folder = STORED / family
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: value.contiguous().clone() for name, value in model.state_dict().items()}
    save_file(state, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    write_expected(family, tokens_of(vocab_size, lengths[1]), logits, lengths)


def module(name: str, **values: Any) -> types.ModuleType:
    """An importable module with these values."""
    made = types.ModuleType(name)
    made.__dict__.update(values)
    made.__path__ = []
    sys.modules[name] = made
    return made


class OptimModule(torch.nn.Module):
    """As in safari's src/utils/train.py, without options of the optimizer."""

    def register(self, name: str, tensor: torch.Tensor, lr: float | None = None, wd: float = 0.0) -> None:
        if lr == 0.0:
            self.register_buffer(name, tensor)
        else:
            self.register_parameter(name, torch.nn.Parameter(tensor))


def stochastic_depth(rate: float, mode: str) -> torch.nn.Module:
    return torch.nn.Identity()


def safari(checkout: Path) -> None:
    module("torchvision")
    module("torchvision.ops", StochasticDepth=stochastic_depth)
    classes: dict[str, Any] = {}

    def instantiate(registry: Any, config: Any, partial: bool = False, **options: Any) -> Any:
        config = {"_name_": config} if isinstance(config, str) else dict(config)
        made = functools_partial(classes[config.pop("_name_")], **config)
        return made

    functools_partial = partial
    for name in ("src", "src.ops", "src.models"):
        module(name)
    registry = module("src.utils.registry", layer=classes)
    module("src.utils", instantiate=instantiate, registry=registry)
    module("src.utils.train", OptimModule=OptimModule)
    assign = lambda self, **values: [setattr(self, name, value) for name, value in values.items()]  # noqa: E731
    module("src.utils.config", instantiate=instantiate, auto_assign_attrs=assign)
    module("src.models.nn", Activation=lambda name: torch.nn.Identity())
    folder = checkout / "src" / "models" / "sequence"
    hyena = runpy.run_path(str(folder / "hyena.py"))
    classes |= {"hyena": hyena["HyenaOperator"], "hyena-filter": hyena["HyenaFilter"]}
    simple_lm = runpy.run_path(str(folder / "simple_lm.py"))
    layer = {"_name_": "hyena", "emb_dim": 5, "filter_order": 8, "l_max": 24, "w": 14, "modulate": False}
    layer["lr_pos_emb"] = 0.0
    config = {"d_model": 12, "n_layer": 2, "d_inner": 20, "vocab_size": 21, "pad_vocab_size_multiple": 8}
    model = simple_lm["SimpleLMHeadModel"](**config, layer={"order": 3, **layer}, embed_dropout=0.0).eval()
    randomize(model)
    tokens = tokens_of(21, LENGTHS[1])
    write(
        "safari",
        model,
        {"_name_": "lm", **config, "layer": {"order": 3, **layer}},
        lambda length: model(torch.as_tensor(tokens[:, :length]))[0].logits[..., :21],
        21,
    )


def hyenadna(checkout: Path) -> None:
    module("torchvision")
    module("torchvision.ops", StochasticDepth=stochastic_depth)
    module("transformers.tokenization_utils", AddedToken=object, PreTrainedTokenizer=object)
    with mock.patch.object(sys, "argv", ["standalone"]):
        found = runpy.run_path(str(checkout / "standalone_hyenadna.py"), run_name="standalone")
    layer = {"_name_": "hyena", "emb_dim": 5, "filter_order": 8, "l_max": 24, "w": 10, "modulate": True}
    layer |= {"lr_pos_emb": 0.0, "num_inner_mlps": 2, "order": 2}
    config = {"d_model": 12, "n_layer": 2, "d_inner": 20, "vocab_size": 12, "pad_vocab_size_multiple": 8}
    options = {name: value for name, value in layer.items() if name != "_name_"}
    model = found["HyenaDNAModel"](**config, layer=dict(options), embed_dropout=0.0).eval()
    randomize(model)
    tokens = tokens_of(12, LENGTHS[1])
    embedding = model.backbone.embeddings.word_embeddings.weight[:12]
    write(
        "hyenadna",
        model,
        {**config, "layer": layer},
        lambda length: model(torch.as_tensor(tokens[:, :length])) @ embedding.T,
        12,
    )


def stripedhyena2() -> None:
    for name in ("flash_attn_2_cuda", "local_causal_conv1d_cuda"):
        module(name)
    from vortex.model import rotary
    from vortex.model.model import StripedHyena
    from vortex.model.utils import dotdict

    def apply_rotary(x: Any, cos: Any, sin: Any, seqlen_offsets: int = 0, *_: Any, **options: Any) -> Any:
        length = x.shape[1]
        y = rotary.apply_rotary_emb_torch(x, cos[:length], sin[:length], options.get("interleaved", False))
        return x.copy_(y) if options.get("inplace") else y

    rotary.apply_rotary = apply_rotary
    torch.cuda.device = lambda device: contextlib.nullcontext()
    settings = {
        "vocab_size": 256,
        "hidden_size": 12,
        "num_filters": 12,
        "num_layers": 5,
        "attn_layer_idxs": [3],
        "hcl_layer_idxs": [2],
        "hcm_layer_idxs": [1, 4],
        "hcs_layer_idxs": [0],
        "hcm_filter_length": 128,
        "hcl_filter_groups": 12,
        "hcm_filter_groups": 3,
        "hcs_filter_groups": 4,
        "hcs_filter_length": 7,
        "short_filter_length": 3,
        "num_attention_heads": 2,
        "short_filter_bias": False,
        "eps": 1e-6,
        "state_size": 4,
        "rotary_emb_base": 10000,
        "rotary_emb_scaling_factor": 4,
        "use_interpolated_rotary_pos_emb": True,
        "inner_mlp_size": 20,
        "make_vocab_size_divisible_by": 8,
        "proj_groups": 1,
        "column_split_hyena": False,
        "column_split": True,
        "interleave": True,
        "evo2_style_activations": True,
        "mlp_activation": "gelu",
        "tie_embeddings": True,
        "mha_out_proj_bias": True,
        "hyena_out_proj_bias": True,
        "qkv_proj_bias": False,
        "final_norm": True,
        "max_seqlen": 160,
    }
    other = dict.fromkeys(
        ("hyena_block_dtype", "attn_block_dtype", "mlp_dtype", "params_dtype"), torch.float32
    )
    other |= {
        "use_flash_attn": False,
        "use_flashfft": False,
        "model_parallel_size": 1,
        "pipe_parallel_size": 1,
    }
    model = StripedHyena(dotdict({**settings, **other})).float().eval()
    randomize(model)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("log_poles"):
                value.copy_(-value.abs() - 0.01)
            if name.endswith("scale"):
                value.add_(1)
    # In its file, q, k and v of each head are together: what loading reorders.
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    model.custom_load_state_dict(state)
    tokens = tokens_of(256, 140)
    kept = types.SimpleNamespace(state_dict=lambda: state)
    write(
        "stripedhyena2",
        kept,
        settings,
        lambda length: model(torch.as_tensor(tokens[:, :length]))[0],
        256,
        (9, 140),
    )


def random_rwkv7(n_layers: int, width: int, head_dim: int, hidden: int, size: int) -> dict[str, torch.Tensor]:
    """Random tensors by the names and shapes of RWKV-LM's `model.py`."""
    ranks, shapes = (
        {"w": 3, "a": 5, "v": 2, "g": 6},
        {"emb.weight": (size, width), "head.weight": (size, width)},
    )
    norms = ["ln_out", "blocks.0.ln0"]
    for i in range(n_layers):
        block, att = f"blocks.{i}", f"blocks.{i}.att"
        norms += [f"{block}.ln1", f"{block}.ln2", f"{att}.ln_x"]
        vectors = [f"x_{name}" for name in "rwkvag"] + ["w0", "a0", "v0", "k_k", "k_a"]
        shapes |= {f"{att}.{name}": (1, 1, width) for name in vectors}
        shapes |= {f"{att}.{name}1": (width, rank) for name, rank in ranks.items()}
        shapes |= {f"{att}.{name}2": (rank, width) for name, rank in ranks.items()}
        dense = ("receptance", "key", "value", "output")
        shapes |= {f"{att}.{name}.weight": (width, width) for name in dense}
        shapes[f"{att}.r_k"] = (width // head_dim, head_dim)
        shapes |= {f"{block}.ffn.x_k": (1, 1, width), f"{block}.ffn.key.weight": (hidden, width)}
        shapes[f"{block}.ffn.value.weight"] = (width, hidden)
    generator = torch.Generator().manual_seed(0)
    state = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for name in norms:
        state[f"{name}.weight"] = 1 + 0.3 * torch.randn(width, generator=generator)
        state[f"{name}.bias"] = 0.3 * torch.randn(width, generator=generator)
    return state


def rwkv7() -> None:
    os.environ |= {"RWKV_V7_ON": "1", "RWKV_JIT_ON": "0", "RWKV_CUDA_ON": "0"}
    from rwkv.model import RWKV

    state, tokens = random_rwkv7(3, 12, 4, 20, 24), tokens_of(24, LENGTHS[1])
    with tempfile.TemporaryDirectory() as folder:
        torch.save(state, f"{folder}/model.pth")
        model = RWKV(f"{folder}/model", "cpu fp32")
    kept = types.SimpleNamespace(state_dict=lambda: state)

    def logits(length: int) -> torch.Tensor:
        return model.forward(tokens[0, :length].tolist(), None, full_output=True)[0][None]

    write("rwkv7", kept, None, logits, 24)


def rwkv7_transformers() -> None:
    write_transformers("rwkv7_transformers", rwkv7_without_kernels())


def rwkv7_without_kernels() -> torch.nn.Module:
    """flash-linear-attention's model, whose Triton kernels need a GPU: its own loop takes the place of the
    rule's, and the elementwise ones are written out."""
    from fla.layers import rwkv7 as layers
    from fla.models.rwkv7 import RWKV7Config, RWKV7ForCausalLM, modeling_rwkv7
    from fla.ops.generalized_delta_rule.dplr.naive import dplr_recurrence

    def token_shift(x: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        return torch.nn.functional.pad(x, (0, 0, 1, -1)) - x, None

    def rule(r: Any, w: Any, k: Any, v: Any, a: Any, b: Any, **_: Any) -> tuple[torch.Tensor, None]:
        of_heads = [x.transpose(1, 2) for x in (r * r.shape[-1] ** 0.5, k, v, a, b, w)]
        return dplr_recurrence(*of_heads)[0].transpose(1, 2), None

    def corrected(o: Any, r: Any, k: Any, r_k: Any, v: Any, g: Any) -> torch.Tensor:
        return (o + ((r * k * r_k).sum(-1, keepdim=True) * v).flatten(-2)) * g

    def mixed(x: Any, delta: Any, *shares: Any) -> list[torch.Tensor]:
        return [x + delta * share for share in shares]

    def key(k: Any, a: Any, k_a: Any) -> torch.Tensor:
        return k.addcmul(k * (a - 1), k_a)

    modeling_rwkv7.token_shift = layers.token_shift = token_shift
    layers.fused_addcmul_rwkv7, layers.fused_k_rwkv7 = mixed, key
    layers.chunk_rwkv7, layers.gate_output_correction = rule, corrected
    layers.fused_mul_recurrent_rwkv7 = lambda r, w, k, v, kk, a, **_: rule(r, w, k, v, -kk, kk * a)
    ranks = {"decay_low_rank_dim": 3, "a_low_rank_dim": 5, "v_low_rank_dim": 2, "gate_low_rank_dim": 6}
    config = RWKV7Config(
        hidden_size=12,
        num_hidden_layers=3,
        head_dim=4,
        intermediate_size=20,
        vocab_size=24,
        fuse_norm=False,
        fuse_cross_entropy=False,
        use_l2warp=False,
        hidden_act="sqrelu",
        **ranks,
    )
    return RWKV7ForCausalLM(config)


def recurrentgemma_flax(checkout: Path) -> None:
    package = module("recurrentgemma")
    package.__path__ = [str(checkout / "recurrentgemma")]
    jax_part = module("recurrentgemma.jax")
    jax_part.__path__ = [str(checkout / "recurrentgemma" / "jax")]
    import jax
    import jax.numpy as jnp
    from recurrentgemma import common
    from recurrentgemma.jax import griffin

    kinds = common.TemporalBlockType
    config = common.GriffinConfig(
        vocab_size=24,
        width=16,
        mlp_expanded_width=24,
        num_heads=2,
        block_types=(kinds.RECURRENT, kinds.RECURRENT, kinds.ATTENTION, kinds.RECURRENT),
        embeddings_scale_by_sqrt_dim=True,
        attention_window_size=2048,
        logits_soft_cap=30.0,
        lru_width=20,
        scan_type=common.ScanType.LINEAR_NATIVE,
    )
    model = griffin.Griffin(config, gradient_checkpointing=False)
    tokens = tokens_of(24, LENGTHS[1])
    places = jnp.arange(LENGTHS[1], dtype=jnp.int32)[None]
    tokens_32 = jnp.asarray(tokens, jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens_32, places)["params"]
    generator = np.random.default_rng(0)
    params = jax.tree.map(lambda x: 0.3 * generator.standard_normal(x.shape).astype(np.float32), params)
    (STORED / "recurrentgemma_flax").mkdir(parents=True, exist_ok=True)
    flat = {
        jax.tree_util.keystr(k, simple=True, separator="/"): v for k, v in jax.tree.leaves_with_path(params)
    }
    np.savez_compressed(STORED / "recurrentgemma_flax" / "params.npz", **flat)

    def logits(length: int) -> np.ndarray:
        given = jnp.asarray(tokens[:, :length], jnp.int32), places[:, :length]
        return jax.jit(model.apply)({"params": params}, *given)[0]

    write_expected("recurrentgemma_flax", tokens, logits, LENGTHS)


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(Path, sys.argv[2:]))
