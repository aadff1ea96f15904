#!/bin/sh
# Build the wheel for 64-bit ARM and run the kernel tests under qemu, on Debian for x86-64. Called by `make test-arm64`.
#
# build/arm64 gets Debian's Python for arm64, the packages that the tests need, and the wheel. Three processors are
# emulated in turn, so that an instruction which a processor lacks is found: A64FX has NEON alone of the instruction sets
# that the kernels use, Neoverse N1 also SDOT, `max` also BFDOT. torch 2.10 runs on no processor before ARMv8.1.
#
# Arguments are for pytest: by default, tests/kernels.

set -e
cd "$(dirname "$0")/.."
host_python="$PWD/.venv/bin/python"
at="$PWD/build/arm64"
mkdir -p "$at/apt/state/lists/partial" "$at/apt/cache/archives/partial"

# apt resolves dependencies for arm64 as if nothing were installed. The packages are only unpacked.
get() {
  : >"$at/apt/status"
  apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures::=arm64 -o Dir::State="$at/apt/state" \
    -o Dir::State::status="$at/apt/status" -o Dir::Cache="$at/apt/cache" -o Debug::NoLocking=1 -o APT::Sandbox::User= "$@"
}
if [ ! -e "$at/root/.complete" ]; then
  get update
  get install --download-only --no-install-recommends --yes libpython3-dev python3 libgomp1 libstdc++6
  for package in "$at"/apt/cache/archives/*.deb; do dpkg-deb --extract "$package" "$at/root"; done
  touch "$at/root/.complete"
fi

cat >"$at/python" <<END
#!/bin/sh
export PYTHONPATH="$at/packages"
exec qemu-aarch64-static -L "$at/root" -0 "$at/python" "$at/root/usr/bin/python3" "\$@"
END
chmod +x "$at/python"

# pip runs on this machine, for speed, so conditions in the metadata of torch would ask for CUDA's packages. torch 2.10 is
# the last one that has a build without CUDA for arm64 on PyPI.
install() {
  "$host_python" -m pip install -qq --disable-pip-version-check --target "$at/packages" --only-binary :all: \
    --python-version "$("$at/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')" \
    --platform linux_aarch64 --platform manylinux2014_aarch64 --platform manylinux_2_17_aarch64 \
    --platform manylinux_2_27_aarch64 --platform manylinux_2_28_aarch64 "$@"
}
if [ ! -e "$at/packages/.complete" ]; then
  rm -rf "$at/packages"
  grep -v '^torch=' constraints.txt >"$at/constraints.txt"
  install --constraint "$at/constraints.txt" einops filelock fsspec gguf hypothesis jinja2 msgspec nanobind networkx \
    numpy psutil pytest pytest-timeout safetensors scikit-build-core sympy tokenizers tqdm transformers
  install --no-deps torch==2.10.0
  touch "$at/packages/.complete"
fi

# The emulated Python names the platform. It starts the CMake of this machine, which starts the cross compiler.
export QEMU_CPU=max PYTHONSAFEPATH=1 OMP_WAIT_POLICY=passive
rm -rf "$at"/wheel "$at"/packages/moeserve*
PATH="$PWD/.venv/bin:$PATH" CMAKE_ARGS="-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64
  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_CXX_FLAGS=-idirafter\ $at/root/usr/include" \
  "$at/python" -c "import scikit_build_core.build as backend; print(backend.build_wheel('$at/wheel'))"
install --no-deps "$at"/wheel/*.whl

for cpu in a64fx neoverse-n1 max; do
  export QEMU_CPU=$cpu
  "$at/python" -c 'import moeserve._cpu as kernels; print("instruction sets:", *kernels.usable_isas())'
  "$at/python" -m pytest -p no:cacheprovider -o timeout=0 --ignore-glob='*/test_sm90_*' "${@:-tests/kernels}"
done
