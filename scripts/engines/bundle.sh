#!/bin/sh
# An engine for an H200 machine that has torch 2.11 (CUDA 13) and Python 3.12, no package index, and room for little:
#   scripts/engines/bundle.sh vllm|sglang FOLDER        makes FOLDER/ENGINE.tar.xz, about 60 MB
# There (-i: archives may be appended to it):
#   tar -ixJf ENGINE.tar.xz
#   ckptkit verify CKPT --serve --engine ENGINE --engine-python ENGINE/python
#
# Left out is what one sm_90 GPU and text models do without: FlashAttention 2 of vLLM, FlashAttention 3 of SGLang,
# kernels of other architectures, tokenizers of Mistral, grammars for the linker. So SGLang wants
#   --engine-arg=--attention-backend=triton --engine-arg=--sampling-backend=pytorch
# and compiles some kernels when it first starts, which needs nvcc there; that of packed weights takes long, so
# sglang_kernels.py compiles it beforehand. Its draft models with CUDA graphs need deep_gemm, which is left out.
set -eu
engine=$1
mkdir -p "$2"
folder=$(cd "$2" && pwd) here=$(cd "$(dirname "$0")" && pwd)
case $engine in
vllm) pins=$here/vllm-0.26.0.txt ;;
sglang) pins=$here/sglang-0.5.17.txt ;;
*) echo "vllm or sglang, not $engine" >&2 && exit 2 ;;
esac
wheels=$folder/$engine-wheels root=$folder/$engine site=$folder/$engine/site
mkdir -p "$wheels"
rm -rf "$root"
mkdir -p "$site"

platforms=$(for glibc in 39 35 34 31 28 27 26 24 17 12 5; do printf ' --platform manylinux_2_%s_x86_64' "$glibc"; done)
# shellcheck disable=SC2086  # words
python3 -m pip --disable-pip-version-check download --quiet --no-deps --only-binary=:all: --python-version 3.12 \
    --implementation cp --platform manylinux2014_x86_64 --platform manylinux2010_x86_64 --platform manylinux1_x86_64 \
    $platforms --dest "$wheels" --requirement "$pins"
for wheel in "$wheels"/*.whl; do
    python3 -m zipfile -e "$wheel" "$site"
done

# Wheels keep libraries and headers in NAME.data/purelib, platlib; scripts are not needed.
for data in "$site"/*.data; do
    [ -d "$data" ] || continue
    for part in purelib platlib; do
        [ ! -d "$data/$part" ] || cp -r "$data/$part/." "$site/"
    done
    rm -rf "$data"
done
cd "$site"
rm -rf xgrammar/lib mistral_common/data/tekken* pycountry/locales
case $engine in
vllm)
    rm -rf vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so vllm/vllm-rs vllm/_flashmla* vllm/_qutlass* nvtx/_lib* \
        vllm/third_party/deep_gemm vllm/third_party/fmha_sm100 vllm/third_party/flashmla
    for library in vllm/_C_stable_libtorch.abi3.so vllm/_moe_C_stable_libtorch.abi3.so; do
        python3 "$here/fatbin.py" "$library" 90
    done
    settings='VLLM_USE_FLASHINFER_SAMPLER=0' # flashinfer is not in the bundle
    ;;
sglang)
    rm -rf sgl_kernel/flash_ops* sgl_kernel/sm100 sgl_kernel/infllm_ops* sgl_kernel/flashmla_ops* \
        torchao/_C_cutlass_90a* torchao/_C_mxfp8*
    # Imported for a progress display only.
    mkdir -p IPython
    : >IPython/__init__.py
    printf 'HTML = str\ndef display(*shown): pass\n' >IPython/display.py
    settings=''
    ;;
esac
for library in xgrammar/*.so zstandard/*.so tokenizers/*.so; do
    [ ! -f "$library" ] || strip --strip-unneeded "$library"
done

cat >"$root/python" <<END
#!/bin/sh
# The Python of this machine, with the engine that lies beside this file.
here=\$(cd "\$(dirname "\$0")" && pwd)
CUDA_HOME=\${CUDA_HOME:-/usr/local/cuda}
export CUDA_HOME PYTHONPATH="\$here/site" PATH="\$CUDA_HOME/bin:\$PATH" $settings
exec python3 "\$@"
END
chmod +x "$root/python"
tar -C "$folder" -cf - "$engine" | xz -9 >"$folder/$engine.tar.xz"
ls -l "$folder/$engine.tar.xz"
