# Kimi K3 (2.78T, 104B active), as published: sourced by the scripts that train it. Sizes come from --k3-model.
MODEL=kimi_k3
FEATURES="${FEATURES:-k3}"
LR="${LR:-2e-4}"
VOCABULARY=163840
MODEL_FLAGS=(
    --transformer-impl local  # MoonEP's stacked experts are its own; KDA and MLA take their own kernels
)
