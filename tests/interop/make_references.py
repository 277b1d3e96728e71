"""Writes `stored/`: tiny models of the public references, every tensor random, and their logits.

    python tests/interop/make_references.py FAMILY [CHECKOUT]

FAMILY and the CHECKOUT of its repository: `recurrentgemma`, `lfm2` and `olmo_hybrid` (package transformers,
no checkout), `recurrentgemma_flax` (google-deepmind/recurrentgemma), `safari` (HazyResearch/safari),
`hyenadna` (HazyResearch/hyena-dna), `stripedhyena2` (package vtx, no checkout), `rwkv7` (package rwkv, no
checkout), `rwkv7_transformers` (package flash-linear-attention, no checkout). Of `safari`, `hyenadna` and
`stripedhyena2` the stored `config.json` says the sizes, and stays. Needs the extra `interop`,
jaxtyping and typeguard 2.13. What a reference imports but this does not need is replaced by empty modules.
"""

import contextlib
import functools
import json
import os
import runpy
import sys
import tempfile
import types
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


SIZES = {"vocab_size": 24, "hidden_size": 16}
"""Of the models of transformers."""


def recurrentgemma() -> None:
    from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

    sizes = {"num_hidden_layers": 4, "intermediate_size": 48, "lru_width": 20, "attention_window_size": 6}
    config = RecurrentGemmaConfig(**SIZES, **sizes, num_attention_heads=2, num_key_value_heads=1)
    write_transformers("recurrentgemma", RecurrentGemmaForCausalLM(config))


def lfm2() -> None:
    from transformers import Lfm2Config, Lfm2ForCausalLM

    sizes = {"num_hidden_layers": 3, "intermediate_size": 30, "block_multiple_of": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = Lfm2Config(**SIZES, **sizes, full_attn_idxs=[1])
    write_transformers("lfm2", Lfm2ForCausalLM(config))


def olmo_hybrid() -> None:
    from transformers import OlmoHybridConfig, OlmoHybridForCausalLM

    sizes = {"num_hidden_layers": 4, "intermediate_size": 20, "max_position_embeddings": 64}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
    sizes |= {"linear_key_head_dim": 6, "linear_value_head_dim": 10}
    rope = {"rope_type": "default", "rope_theta": None}
    config = OlmoHybridConfig(**SIZES, **sizes, rope_parameters=rope, pad_token_id=None, eos_token_id=None)
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


def write(family: str, state: dict, logits: Any, vocab_size: int, lengths: Any = LENGTHS) -> None:
    """A model that is not of transformers: its state and logits."""
    folder = STORED / family
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.contiguous().clone() for name, value in state.items()}
    save_file(tensors, folder / "model.safetensors")
    write_expected(family, tokens_of(vocab_size, lengths[1]), logits, lengths)


def stored_config(family: str) -> dict[str, Any]:
    return json.loads((STORED / family / "config.json").read_text())


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
        return functools.partial(classes[config.pop("_name_")], **config)

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
    config = stored_config("safari")
    del config["_name_"]
    model = simple_lm["SimpleLMHeadModel"](**config, embed_dropout=0.0).eval()
    randomize(model)
    tokens = tokens_of(21, LENGTHS[1])

    def logits(length: int) -> torch.Tensor:
        return model(torch.as_tensor(tokens[:, :length]))[0].logits[..., :21]

    write("safari", model.state_dict(), logits, 21)


def hyenadna(checkout: Path) -> None:
    module("torchvision")
    module("torchvision.ops", StochasticDepth=stochastic_depth)
    module("transformers.tokenization_utils", AddedToken=object, PreTrainedTokenizer=object)
    with mock.patch.object(sys, "argv", ["standalone"]):
        found = runpy.run_path(str(checkout / "standalone_hyenadna.py"), run_name="standalone")
    config = stored_config("hyenadna")
    del config["layer"]["_name_"]
    model = found["HyenaDNAModel"](**config, embed_dropout=0.0).eval()
    randomize(model)
    tokens = tokens_of(12, LENGTHS[1])
    embedding = model.backbone.embeddings.word_embeddings.weight[:12]

    def logits(length: int) -> torch.Tensor:
        return model(torch.as_tensor(tokens[:, :length])) @ embedding.T

    write("hyenadna", model.state_dict(), logits, 12)


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
    dtypes = ("hyena_block_dtype", "attn_block_dtype", "mlp_dtype", "params_dtype")
    settings = {**stored_config("stripedhyena2"), **dict.fromkeys(dtypes, torch.float32)}
    settings |= {"use_flash_attn": False, "use_flashfft": False}
    settings |= {"model_parallel_size": 1, "pipe_parallel_size": 1}
    model = StripedHyena(dotdict(settings)).float().eval()
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

    def logits(length: int) -> torch.Tensor:
        return model(torch.as_tensor(tokens[:, :length]))[0]

    write("stripedhyena2", state, logits, 256, (9, 140))


def random_rwkv7(n_layers: int, width: int, head_dim: int, hidden: int, size: int) -> dict[str, torch.Tensor]:
    """Random tensors by the names and shapes of RWKV-LM's `model.py`."""
    ranks = {"w": 3, "a": 5, "v": 2, "g": 6}
    shapes = {"emb.weight": (size, width), "head.weight": (size, width)}
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

    def logits(length: int) -> torch.Tensor:
        return model.forward(tokens[0, :length].tolist(), None, full_output=True)[0][None]

    write("rwkv7", state, logits, 24)


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
    sizes = {"hidden_size": 12, "num_hidden_layers": 3, "head_dim": 4, "intermediate_size": 20}
    plain = {"fuse_norm": False, "fuse_cross_entropy": False, "use_l2warp": False, "hidden_act": "sqrelu"}
    return RWKV7ForCausalLM(RWKV7Config(vocab_size=24, **sizes, **plain, **ranks))


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
