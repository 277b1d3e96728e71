"""Published code of the delta family, with random weights: values and gradients; run with -m interop.

Of the packages fla-core and mamba-ssm, whose modules need a GPU, functions in plain PyTorch are taken out of
the files. RWKV-7 and gated DeltaNet-2 are those of flash-linear-attention, with its own loops in place of its
kernels. What is not installed is skipped; mamba-ssm's source is enough, unpacked on PYTHONPATH.
"""

import ast
import dataclasses
import importlib.util
import inspect
import math
from pathlib import Path
from typing import Optional

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict
from references import STORED, params_of, source_of
from tolerances import assert_close

from hyena_jax import models
from hyena_jax.config import GatedDelta2Config, KDAConfig, Mamba3Config
from hyena_jax.interop.tensors import read_tensors
from hyena_jax.mixers import mixer_class
from hyena_jax.ops.delta_rule import delta_rule
from hyena_jax.system.trees import named_leaves

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore")]
torch = pytest.importorskip("torch")
einops = pytest.importorskip("einops")
functional = torch.nn.functional
B, L, H, K, V = 2, 32, 3, 8, 6


def functions(package, path, *names):
    """Functions of a file of a package, which is not imported."""
    found = importlib.util.find_spec(package)
    if found is None:
        pytest.skip(f"needs {package}")
    source = (Path(found.origin).parent / path).read_text()
    kept = [node for node in ast.parse(source).body if getattr(node, "name", None) in names]
    scope = {"torch": torch, "F": functional, "math": math, "Optional": Optional}
    scope["rearrange"] = einops.rearrange
    exec(compile(ast.Module(kept, []), path, "exec"), scope)
    return [scope[name] for name in names]


def normal(*shape):
    return np.random.default_rng([*shape]).standard_normal(shape).astype(np.float32)


def check(ours, theirs, args):
    """The outputs and the gradients of all arguments, which are named alike.

    The gradient of KDA's a_log is compared less closely: transformers' log(1 + exp(g)) loses digits, so that
    it is wrong by 1.7e-5 of the largest, and ours by 3e-7.
    """
    tensors = {name: torch.tensor(np.asarray(x), requires_grad=True) for name, x in args.items()}
    expected = theirs(**tensors)
    weights = [normal(*y.shape) for y in expected]
    sum((torch.tensor(w) * y).sum() for w, y in zip(weights, expected, strict=True)).backward()

    def loss(args):
        return sum((w * y).sum() for w, y in zip(weights, ours(**args), strict=True))

    for found, y in zip(jax.jit(lambda args: ours(**args))(args), expected, strict=True):
        assert_close(found, y.detach().numpy())
    for name, gradient in jax.jit(jax.grad(loss))(args).items():
        expected = tensors[name].grad.numpy()
        if name == "a_log":
            np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
        else:
            assert_close(gradient, expected)


def rule_inputs(heads=H):
    rng = np.random.default_rng(0)
    k = normal(B, L, heads, K)
    return {
        "q": normal(B, L, heads, K),
        "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
        "v": normal(B, L, heads, V),
        "log_a": -np.exp(normal(B, L, heads, K)),
        "strength": rng.uniform(0, 2, (B, L, heads, K)).astype(np.float32),
        "state": normal(B, heads, K, V),
    }


def test_the_rule_of_gated_delta_2():
    (naive,) = functions("fla", "ops/gdn2/naive.py", "naive_recurrent_gdn2")

    def ours(q, k, v, log_a, strength, state, written):
        return delta_rule(K**-0.5 * q, k, written * v, log_a, strength * k, None, state)

    def theirs(q, k, v, log_a, strength, state, written):
        return naive(q, k, v, log_a, strength, written, initial_state=state, output_final_state=True)

    check(ours, theirs, {**rule_inputs(), "written": normal(B, L, H, V)})


def test_the_rule_of_kda():
    (naive,) = functions("fla", "ops/kda/naive.py", "naive_recurrent_kda")

    def ours(q, k, v, log_a, beta, state):
        read = beta[..., None] * jnp.repeat(k, 2, axis=2)
        return delta_rule(K**-0.5 * q, k, beta[..., None] * v, log_a, read, None, state)

    def theirs(q, k, v, log_a, beta, state):
        return naive(q, k, v, log_a, beta, initial_state=state, output_final_state=True)

    args = rule_inputs(4)
    beta = args.pop("strength")[..., 0]
    few = {name: args[name][:, :, ::2] for name in ("q", "k")}  # two heads of values for one of keys
    check(ours, theirs, {**args, **few, "beta": beta})


@pytest.mark.parametrize("form", ["recurrence", "chunkwise"])
def test_the_rule_of_rwkv7(form):
    (naive,) = functions("fla", "ops/generalized_delta_rule/dplr/naive.py", f"dplr_{form}")

    def ours(q, k, v, log_a, strength, state):
        return delta_rule(K**-0.5 * q, k, v, log_a, k * jnp.exp(-log_a), strength * k, state)

    def theirs(q, k, v, log_a, strength, state):
        of_heads = [x.transpose(1, 2) for x in (q, k, v, -k, strength * k, log_a)]
        o, state = naive(*of_heads, initial_state=state)
        return o.transpose(1, 2), state

    args = rule_inputs()
    bounded = -math.exp(-0.5) / (1 + np.exp(args["log_a"]))
    check(ours, theirs, {**args, "strength": args["strength"] / 2, "log_a": bounded})


def check_layer(config, d_model, theirs):
    """A mixer and a function of its parameters by their paths, and of x [B, L, D]."""
    module = mixer_class(config)(d_model, L, config)
    x = normal(B, L, d_model)
    shapes = named_leaves(jax.eval_shape(module.init, jax.random.key(0), x)["params"])

    def random(i, path, shape):
        noise = 0.3 * np.random.default_rng(i).standard_normal(shape).astype(np.float32)
        return noise + 1 if path.endswith("scale") else noise

    params = {path: random(i, path, leaf.shape) for i, (path, leaf) in enumerate(shapes.items())}

    def ours(x, **params):
        return (module.apply({"params": unflatten_dict(params, sep="/")}, x),)

    check(ours, lambda x, **params: (theirs(params, x),), {"x": x, **params})


def channel_decay_names(params, sizes, names):
    """What KDA's and gated DeltaNet-2's layers share, by the names of a reference."""
    parts = params["qkv_proj/kernel"].T.split(sizes)
    return {
        **{f"{name}_proj.weight": part for name, part in zip("qkv", parts, strict=True)},
        "A_log": params["a_log"],
        "dt_bias": params["dt_bias"],
        "o_norm.weight": params["norm/scale"],
        "o_proj.weight": params["out_proj/kernel"].T,
        **{theirs: params[f"{ours}/kernel"].T for ours, theirs in names.items()},
    }


def without_kernels(monkeypatch, module):
    """A module of transformers, which would call those of flash-linear-attention where that is installed."""
    for name, value in [*vars(module).items()]:
        if "chunk_" in name and callable(value):
            monkeypatch.setattr(module, name, inspect.unwrap(value))
    return module


def test_the_layer_of_kimi_linear(monkeypatch):
    modeling = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    without_kernels(monkeypatch, modeling)
    settings = modeling.KimiLinearConfig(
        hidden_size=12,
        num_hidden_layers=1,
        linear_num_heads=2,
        linear_head_dim=4,
        layer_types=["linear_attention"],
    )
    layer = modeling.KimiLinearDeltaAttention(settings, 0)
    names = {"beta_proj": "b_proj.weight", "gate_down": "g_a_proj.weight", "gate_up": "g_b_proj.weight"}
    names |= {"decay_down": "forget_gate.f_a_proj.weight", "decay_up": "forget_gate.f_b_proj.weight"}

    def theirs(params, x):
        tensors = channel_decay_names(params, [8, 8, 8], names)
        tensors["forget_gate.A_log"] = tensors.pop("A_log").reshape(1, 1, -1, 1)
        tensors["forget_gate.dt_bias"] = tensors.pop("dt_bias")
        tensors["conv1d.weight"] = params["short_taps"].flip(-1)[:, None]
        return torch.func.functional_call(layer, tensors, (x,), strict=True)

    check_layer(KDAConfig(n_heads=2, key_dim=4, gate_bias=False), 12, theirs)


@pytest.mark.parametrize("is_signed", [False, True])
def test_the_layer_of_gated_delta_2(monkeypatch, is_signed):
    """With two heads of values for one of keys, and the loop and PyTorch's operations for its kernels."""
    pytest.importorskip("fla.layers")
    from fla.layers import gdn2
    from fla.ops.gdn2.naive import naive_recurrent_gdn2

    def rule(q, k, v, g, b, w, **_):
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        return naive_recurrent_gdn2(q, k, v, g, b, w)

    def normed(self, x, gate):
        mean_square = x.square().mean(-1, keepdim=True)
        return self.weight * x * (mean_square + self.eps).rsqrt() * gate.sigmoid()

    def convolved(self, x, **_):
        y = functional.conv1d(functional.pad(x.mT, (3, 0)), self.weight, groups=x.shape[-1])
        return functional.silu(y.mT), None

    monkeypatch.setattr(gdn2, "chunk_gdn2", rule)
    monkeypatch.setattr(gdn2.FusedRMSNormGated, "forward", normed)
    monkeypatch.setattr(gdn2.ShortConvolution, "forward", convolved)
    layer = gdn2.GatedDeltaNet2(12, 1.5, 4, 2, 4, allow_neg_eigval=is_signed)
    names = {"erase_proj": "b_proj.weight", "write_proj": "w_proj.weight"}
    names |= {"decay_down": "f_proj.0.weight", "decay_up": "f_proj.1.weight"}
    names |= {"gate_down": "g_proj.0.weight", "gate_up": "g_proj.1.weight"}

    def theirs(params, x):
        sizes = [8, 8, 24]
        tensors = channel_decay_names(params, sizes, names) | {"g_proj.1.bias": params["gate_up/bias"]}
        taps = params["short_taps"].flip(-1)[:, None].split(sizes)
        tensors |= {f"{name}_conv1d.weight": part for name, part in zip("qkv", taps, strict=True)}
        return torch.func.functional_call(layer, tensors, (x,), strict=True)[0]

    config = GatedDelta2Config(n_heads=2, n_value_heads=4, key_dim=4, value_dim=6, gate="sigmoid")
    check_layer(dataclasses.replace(config, negative_eigenvalues=is_signed), 12, theirs)


@pytest.mark.parametrize(
    "config",
    [
        Mamba3Config(n_heads=4, d_state=8, n_groups=2),
        Mamba3Config(n_heads=4, d_state=8, rotary_fraction=1.0, out_norm=True),
        Mamba3Config(n_heads=4, d_state=8, n_groups=2, n_inputs=3),
        Mamba3Config(n_heads=4, d_state=8, n_inputs=2, out_norm=True),
    ],
)
def test_the_steps_of_mamba3(config):
    """Token by token, by the two references of its decoding kernels."""
    (turn,) = functions(
        "mamba_ssm", "ops/triton/mamba3/mamba3_mimo_rotary_step.py", "apply_rotary_qk_inference_reference"
    )
    (update,) = functions(
        "mamba_ssm", "ops/cute/mamba3/mamba3_step_fn.py", "selective_state_update_fused_ref_v2"
    )
    d_model, heads, inputs, states = 6, config.n_heads, config.n_inputs, config.d_state
    width, is_mimo = config.inner_factor * d_model, inputs > 1

    def normed(x, scale):
        return scale * x * (x.square().mean(-1, keepdim=True) + config.norm_eps).rsqrt()

    def theirs(params, x):
        of_states = inputs * config.n_groups * states
        sizes = [width, width, of_states, of_states, heads, heads, heads, config.n_planes]
        z, v, b, c, dt, rate, trap, angle = (x @ params["in_proj/kernel"]).split(sizes, dim=-1)
        dt = functional.softplus(dt + params["dt_bias"])
        a = -functional.softplus(rate).clamp(min=1e-4)
        b, c = (y.reshape(*x.shape[:2], inputs, config.n_groups, states) for y in (b, c))
        b, c = (
            normed(y, params[f"{name}_norm/scale"]).repeat_interleave(heads // config.n_groups, dim=3)
            for y, name in ((b, "b"), (c, "c"))
        )
        v, z = (y.reshape(*x.shape[:2], heads, -1) for y in (v, z))
        ones = torch.ones(heads, inputs, width // heads)
        mimo_x, mimo_z, mimo_o = (params.get(f"mimo_{y}", ones).transpose(0, 1) for y in "xzo")
        theta = torch.zeros(len(x), heads, config.n_planes)
        state = torch.zeros(len(x), heads, width // heads, states)
        last_k, last_v, found = torch.zeros(len(x), inputs, heads, states), torch.zeros_like(v[:, 0]), []
        for t in range(x.shape[1]):
            q, k, theta = turn(
                c[:, t],
                b[:, t],
                theta,
                angle[:, t, None].expand(-1, heads, -1),
                dt[:, t],
                params["c_bias"].transpose(0, 1),
                params["b_bias"].transpose(0, 1),
                rotate_pairwise=not is_mimo,
            )
            gate, outputs = (None, None) if config.out_norm else (z[:, t], mimo_o)
            y, state = update(
                *(state, a[:, t], k, q, mimo_x, v[:, t], mimo_z, gate, dt[:, t], last_k, last_v),
                *(trap[:, t].sigmoid(), params["skip"], outputs),
            )
            if config.out_norm:  # [B, R, H, P], as `_postprocess` does
                y = normed(y, params["norm/scale"].reshape(heads, -1))
                y = (y * functional.silu(z[:, t, None] * mimo_z) * mimo_o).sum(dim=1)
            last_k, last_v = k, v[:, t]
            found.append(y.flatten(1))
        return torch.stack(found, dim=1) @ params["out_proj/kernel"]

    check_layer(config, d_model, theirs)


def olmo_hybrid(monkeypatch):
    modeling = pytest.importorskip("transformers.models.olmo_hybrid.modeling_olmo_hybrid")
    model = without_kernels(monkeypatch, modeling).OlmoHybridForCausalLM
    return model.from_pretrained(STORED / "olmo_hybrid", dtype=torch.float32)


def rwkv7_transformers(monkeypatch):
    pytest.importorskip("fla.layers")
    from make_references import rwkv7_without_kernels

    model = rwkv7_without_kernels()
    tensors = read_tensors(STORED / "rwkv7_transformers")
    model.load_state_dict({name: torch.tensor(np.array(x.read())) for name, x in tensors.items()})
    return model


@pytest.mark.parametrize("make", [olmo_hybrid, rwkv7_transformers])
def test_gradients_of_whole_models(monkeypatch, make):
    """Of the logits, with respect to every tensor of the reference.

    Ours in float64: in float32 the gradients of Olmo Hybrid's random weights, of up to 1,500, have rounding
    errors of 2e-4 of the largest.
    """
    source, theirs = source_of(make.__name__), make(monkeypatch)
    model = models.build(source.model)
    tokens = np.random.default_rng(2).integers(0, 24, (B, 23))
    logits = theirs(torch.as_tensor(tokens), use_cache=False).logits
    weights = normal(*logits.shape)
    (torch.tensor(weights) * logits).sum().backward()

    def loss(params):
        return (weights * model.apply({"params": params}, tokens)).sum()

    with jax.enable_x64(True):
        params = jax.tree.map(np.float64, params_of(source))
        gradients = named_leaves(jax.device_get(jax.jit(jax.grad(loss))(params)))
    found = {}
    for path, transform in source.table.transforms.items():
        zeros = transform.write(np.zeros_like(gradients[path]))
        for name, gradient, zero in zip(
            transform.names, transform.write(gradients[path]), zeros, strict=True
        ):
            found[name] = found.get(name, 0) + gradient - zero
    expected = {name: x.grad.numpy() for name, x in theirs.named_parameters() if x.grad is not None}
    most = max(np.abs(x).max() for x in expected.values())
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        np.testing.assert_allclose(found[name], gradient, rtol=0, atol=1e-4 * most, err_msg=name)
