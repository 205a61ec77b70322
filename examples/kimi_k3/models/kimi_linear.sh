# Kimi Linear (48B, 3B active), as published: sourced by the scripts that train it. Sizes come from --k3-model.
MODEL=kimi_linear
FEATURES="${FEATURES:-kda,gated-mla,quantile-balancing,moonep,per-head-muon,pipeline-zero2}"
SEQ_LENGTH="${SEQ_LENGTH:-8192}"
LR="${LR:-3e-4}"
VOCABULARY=163840
MODEL_FLAGS=(--transformer-impl local)  # MoonEP's stacked experts are its own; KDA and MLA take their own kernels
