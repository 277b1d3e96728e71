"""Experiments as frozen dataclasses, and how they are loaded, compared and saved.

Nothing here imports JAX, so that `--help` is quick. A field marked RUNTIME may change when a run is resumed;
every other field of an experiment is its identity.
"""

from hyena_jax.config.checks import Above, AtLeast, AtMost, Below, Between, Checked
from hyena_jax.config.data import (
    DATA_CONFIGS,
    DataConfig,
    ImagesConfig,
    ShardsConfig,
    TextConfig,
    TokensConfig,
)
from hyena_jax.config.files import (
    config_files,
    decode,
    encode,
    identity_differences,
    is_run,
    load,
    read,
    read_run,
    read_stages,
    runtime_differences,
    stage_changes,
    stages_after,
)
from hyena_jax.config.filters import (
    FILTER_CONFIGS,
    CKConvFilterConfig,
    ExplicitFilterConfig,
    FilterConfig,
    FNOFilterConfig,
    ImplicitFilterConfig,
    LookupFilterConfig,
    ModalFilterConfig,
    RealModalFilterConfig,
    S4DFilterConfig,
    ShortFilterConfig,
    SirenFilterConfig,
    STUFilterConfig,
    TransferFunctionFilterConfig,
    WindowedFilterConfig,
)
from hyena_jax.config.mixers import (
    MIXER_CONFIGS,
    AFTConvConfig,
    AFTFullConfig,
    AFTLocalConfig,
    AFTSimpleConfig,
    AnnotatedHyenaConfig,
    AttentionConfig,
    FastmaxConfig,
    FIRConfig,
    GatedDelta2Config,
    GatedDeltaConfig,
    GatedHyenaConfig,
    H3Config,
    HawkConfig,
    HyenaConfig,
    Init,
    KDAConfig,
    LocalAttentionConfig,
    Mamba2Config,
    Mamba3Config,
    MixerConfig,
    RWKV7Config,
    S4DConfig,
)
from hyena_jax.config.models import (
    MODEL_CONFIGS,
    AutoencoderConfig,
    BackboneConfig,
    ImageClassifierConfig,
    LanguageModelConfig,
    LoRAConfig,
    ModelConfig,
)
from hyena_jax.config.optimizers import (
    HYENA_GROUPS,
    NO_DECAY,
    OPTIMIZER_CONFIGS,
    SCHEDULE_CONFIGS,
    AdafactorConfig,
    AdamWConfig,
    ConstantConfig,
    CosineConfig,
    DecayScheduleConfig,
    GroupedOptimizerConfig,
    LinearConfig,
    LionConfig,
    MuonConfig,
    OptimizerConfig,
    ParameterGroup,
    ScheduleConfig,
    SGDConfig,
    WarmupScheduleConfig,
    WarmupStableDecayConfig,
)
from hyena_jax.config.plugins import (
    changed_plugins,
    is_of_own_code,
    load_plugin,
    missing_parts,
    own_code,
    plugin_flags,
    plugins_in,
)
from hyena_jax.config.registry import REGISTRIES, Targets, name_of, register
from hyena_jax.config.tasks import TASK_CONFIGS, TaskConfig
from hyena_jax.config.training import (
    AccuracyConfig,
    Cluster,
    CrossEntropyConfig,
    Experiment,
    LoggingConfig,
    LossConfig,
    MetricConfig,
    ParallelConfig,
    TensorBoardConfig,
    TopKAccuracyConfig,
    TrackerConfig,
    TrainingConfig,
    WandbConfig,
)
