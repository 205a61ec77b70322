"""Packaging of k3_plugins.

Neither torch nor megatron-core is a requirement here: many users run a checkout of Megatron-LM on a vendor's torch, and
an install must not replace either. The verified versions of both are in requirements.txt, and ``k3-doctor`` says which
Megatron was found.
"""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = next(
    line.split('"')[1]
    for line in (HERE / "k3_plugins" / "__init__.py").read_text(encoding="utf-8").splitlines()
    if line.startswith("__version__")
)

setup(
    name="k3-plugins",
    version=VERSION,
    description="Turns an unmodified Megatron-Core into a trainer for Kimi-K3-style models",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    python_requires=">=3.12,<3.14",
    packages=find_packages(include=["k3_plugins", "k3_plugins.*"]),
    package_data={"k3_plugins": ["py.typed", "patching/fingerprints/*.json"]},
    install_requires=["numpy", "einops", "rich", "matplotlib", "tensorboard", "pyyaml", "pydantic"],
    extras_require={
        "kda": ["fla-core==0.6.0"],
        "moonep": ["numba==0.68.1"],
        "muon": ["emerging-optimizers==0.3.0"],
        # The last two are needs that nvidia-modelopt does not declare.
        "qat": ["nvidia-modelopt==0.47.0", "requests==2.34.2", "huggingface-hub==2.4.0"],
        "data": [
            "sentencepiece==0.2.3",
            "tokenizers==0.23.3",
            "transformers==5.24.0",
            "megatron-energon==7.4.1",
        ],
        "vision": ["resvg-py==0.5.0", "megatron-energon==7.4.1"],
        "offload": ["deepspeed==0.19.8"],
        "transfer": ["mooncake-transfer-engine-non-cuda==0.3.13.post1"],
        # The hyphen matters: the name with an underscore is an empty package that breaks `import megatron.core`.
        "gpu": ["transformer-engine[core-cu13,pytorch]"],
        "docs": ["mkdocs==1.6.1"],
        "test": [
            "pytest==9.2.0",
            "mkdocs==1.6.1",
            "hypothesis==6.170.17",
            "ruff==0.17.6",
            "mypy==2.4.1",
            "types-PyYAML==6.0.12.20261122",
            "scipy==1.18.1",
            "safetensors==0.8.0",
            "resvg-py==0.5.0",
            "transformers==5.24.0",
            "fla-core==0.6.0",
            "nvidia-modelopt==0.47.0",
            "requests==2.34.2",
            "huggingface-hub==2.4.0",
        ],
    },
    entry_points={
        "console_scripts": [
            "k3-pretrain=k3_plugins.pretrain_gpt:main",
            "k3-launch=k3_plugins.launch:main",
            "k3-doctor=k3_plugins.doctor:main",
        ]
    },
)
