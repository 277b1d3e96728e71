"""The image classifier. Axes: B batch, L patches, D channels of the model."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyena_jax.config import ImageClassifierConfig
from hyena_jax.mixers.layers import make_norm
from hyena_jax.models.blocks import activation_dtype, apply_blocks, make_blocks
from hyena_jax.ops.forms import Layout
from hyena_jax.ops.initializers import initializers
from hyena_jax.system.errors import require


class ImageClassifier(nn.Module):
    """Patches in row-major order, blocks, and a linear head on the patches' mean or on each patch.

    Attributes:
      config: its image_size, channels and n_classes must be known.

    Parameters:
      patches/kernel [patch_height, patch_width, colours, D]: row, column and colour of a pixel in its patch.
      patches/bias [D]:
      positions [Lmax, D]: row i is added to patch i, in row-major order; only with learned_positions.
      blocks_0/*: and so on for n_layers blocks.
      final_norm/scale [D]: of LayerNorm the factor, of RMSNorm the factor less 1.
      final_norm/bias [D]: only of LayerNorm.
      head/kernel [D, n_classes]:
      head/bias [n_classes]:
    """

    config: ImageClassifierConfig
    layout: Layout = Layout()

    def setup(self) -> None:
        config = self.config
        dtype = activation_dtype(config)
        height, width = config.patch_size
        pixels = initializers(config.init, config.n_layers, height * width * config.channels, config.d_model)
        init = initializers(config.init, config.n_layers, config.d_model, config.d_model)
        self.patches = nn.Conv(
            config.d_model,
            config.patch_size,
            strides=config.patch_size,
            padding="VALID",
            dtype=dtype,
            kernel_init=pixels.kernel,
            bias_init=pixels.bias,
        )
        if config.learned_positions:
            shape = config.max_len, config.d_model
            self.positions = self.param("positions", init.embedding, shape, jnp.float32)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = make_blocks(config, dtype, None, self.layout)
        self.final_norm = make_norm(config.final_norm, dtype, config.norm_eps)
        self.head = nn.Dense(config.n_classes, dtype=dtype, kernel_init=init.head, bias_init=init.bias)

    def __call__(self, images: jax.Array, segment_ids: None = None, deterministic: bool = True) -> jax.Array:
        """Logits, float32 at least, of images [B, height, width, colours], floating point.

        The shape is [B, n_classes] with head `average_pool` and [B, L, n_classes] with `per_token`, L =
        max_len. Pixels at the right and lower border that fill no patch are ignored.

        Raises:
          ValueError: for images of another rank, size or number of colours than the config's.
        """
        config = self.config
        require(images.ndim == 4, "images", images.shape, "of rank 4, [B, height, width, colours]")
        require(len(images) >= 1, "batch size", len(images), "at least 1")
        is_floating = jnp.issubdtype(images.dtype, jnp.floating)
        require(is_floating, "images.dtype", str(images.dtype), "a floating point type")
        require(
            images.shape[1:3] == config.image_size, "image size", images.shape[1:3], f"{config.image_size}"
        )
        require(images.shape[3] == config.channels, "colours", images.shape[3], f"channels={config.channels}")
        require(segment_ids is None, "segment_ids", segment_ids, "None: an image has no documents")
        x = self.patches(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        if self.config.learned_positions:
            x = x + self.positions.astype(x.dtype)
        x = self.dropout(x, deterministic)
        x = apply_blocks(self.blocks, x, None, deterministic)
        x = self.final_norm(x)
        if self.config.head == "average_pool":
            x = x.mean(axis=1)
        logits = self.head(x)
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
