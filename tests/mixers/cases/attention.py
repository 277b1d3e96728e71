"""Softmax attention, full and local."""

from cases.case import Case, D, make_case
from hyena_jax.config import AttentionConfig, LocalAttentionConfig


def attention_case(config: AttentionConfig | LocalAttentionConfig) -> Case:
    heads, shared, d = config.n_heads, config.n_kv_heads or config.n_heads, D // config.n_heads
    normalised = (heads * d, shared * d) if config.qk_norm == "all" else (d, d)
    letters = {"H": heads, "G": shared, "d": d, **dict(zip("QN", normalised, strict=True))}
    return make_case(config, letters, through_library=True)


CASES = {
    "attention": attention_case(AttentionConfig(4)),
    # In blocks at L = 64 and 127, with a partial last block; at once at 1 and 7.
    # Eps are large enough to be seen, here and below.
    "local_attention": attention_case(LocalAttentionConfig(2, window=5, qk_norm_eps=0.1)),
}
CONFIGS = {
    "attention_1_head": AttentionConfig(1),
    "attention_grouped": AttentionConfig(4, n_kv_heads=2, init="torch"),
    "attention_multi_query": AttentionConfig(4, n_kv_heads=1, init="griffin"),
    "attention_rotary": AttentionConfig(2, rotary_fraction=1.0, rotary_base=100.0),
    "attention_without_biases": AttentionConfig(2, qkv_bias=False, out_bias=False, init="xavier"),
    "attention_qk_norm": AttentionConfig(
        2, n_kv_heads=1, qk_norm_eps=0.1, rotary_fraction=0.5, rotary_scaling=3.0
    ),
    "attention_qk_norm_of_all_heads": AttentionConfig(
        4, n_kv_heads=2, qk_norm_eps=0.1, qk_norm="all", rotary_fraction=1.0
    ),
    "attention_hard_alibi": AttentionConfig(4, hard_alibi_heads=3),
    "attention_hard_alibi_grouped": AttentionConfig(
        4, n_kv_heads=2, hard_alibi_heads=2, rotary_fraction=1.0
    ),
    "local_attention_without_qk_norm": LocalAttentionConfig(2, window=5),
    "local_attention_hard_alibi": LocalAttentionConfig(
        4, n_kv_heads=4, hard_alibi_heads=3, rotary_fraction=0.0, window=1
    ),
    "attention_bidirectional": AttentionConfig(2, rotary_fraction=0.5, causal=False),
    "local_attention_grouped": LocalAttentionConfig(
        4, n_kv_heads=2, rotary_fraction=1.0, rotary_scaling=4.0, qk_norm_eps=1e-5, qkv_bias=True,
        out_bias=False, window=1,
    ),
    "local_attention_window_beyond_length": LocalAttentionConfig(
        2, n_kv_heads=None, rotary_fraction=0.0, window=200
    ),
}  # fmt: skip
OPTIONS = {name: attention_case(config) for name, config in CONFIGS.items()}
