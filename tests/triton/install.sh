#!/bin/bash
# A real Triton Inference Server (2.51, from the package nvidia-pytriton) with its Python backend, and
# the backend of these tests in the place of vLLM's:  install.sh DEST [PYTHON]
#
# PYTHON is a CPython 3.8 to 3.12 with a shared libpython and a numpy 1 wheel; without one, Debian 13
# gets Debian 12's python3.11 beside its own. Prints the command that starts the server.
set -euo pipefail
DEST=$1 HERE=$(cd "$(dirname "$0")" && pwd)
suits() { "$1" - <<'PY' 2>/dev/null
import sys, sysconfig
sys.exit(not ((3, 8) <= sys.version_info[:2] <= (3, 12) and sysconfig.get_config_var("Py_ENABLE_SHARED")))
PY
}
PYTHON=${2:-}
for candidate in ${PYTHON:-python3 python3.12 python3.11 /usr/bin/python3.11}; do
  if suits "$candidate"; then PYTHON=$(command -v "$candidate"); break; fi
done
if ! suits "${PYTHON:-none}"; then
  # Debian 13: its Python has no numpy 1. Debian 12's, pinned low, from the mirror that is set up.
  SOURCE=$(grep -rhE '^URIs:.*debian/?$|^deb .*debian ' /etc/apt/sources.list /etc/apt/sources.list.d 2>/dev/null |
    grep -oE 'https?://[^ ]+' | grep -v security | head -1)
  KEY=/usr/share/keyrings/debian-archive-keyring.gpg
  echo "deb [signed-by=$KEY] $SOURCE bookworm main" > /etc/apt/sources.list.d/specbench-bookworm.list
  printf 'Package: *\nPin: release n=bookworm\nPin-Priority: 100\n' > /etc/apt/preferences.d/specbench-bookworm
  apt-get -q update >&2 && apt-get -qy install python3.11 libpython3.11 >&2
  PYTHON=/usr/bin/python3.11
fi
VERSION=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
mkdir -p "$DEST"
"$PYTHON" -m venv --without-pip "$DEST/venv" >&2
PIP=(python3 -m pip -q --disable-pip-version-check)
"${PIP[@]}" --python "$DEST/venv/bin/python" install "numpy<2" >&2
"${PIP[@]}" download --no-deps -d "$DEST/wheel" --only-binary :all: --python-version "$VERSION" nvidia-pytriton==0.7.0 >&2
python3 -m zipfile -e "$DEST"/wheel/*.whl "$DEST/unpacked"
T=$DEST/unpacked/pytriton/tritonserver
cp "$T/python_backend_stubs/$VERSION/triton_python_backend_stub" "$T/backends/python/"
chmod +x "$T/bin/tritonserver" "$T/backends/python/triton_python_backend_stub"
mkdir -p "$T/backends/vllm"
cp "$HERE/model.py" "$HERE/worker.py" "$T/backends/vllm/"
LIBDIR=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_config_var("LIBDIR"))')
# The stub runs Python isolated and in the C locale: text that is not ASCII would be an error.
SITE=$("$DEST/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
printf 'import locale\nlocale.setlocale(locale.LC_CTYPE, "C.UTF-8")\n' > "$SITE/sitecustomize.py"
cat > "$DEST/tritonserver.new" <<SCRIPT
#!/bin/sh
export PATH=$DEST/venv/bin:\$PATH LD_LIBRARY_PATH=$LIBDIR\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}
exec $T/bin/tritonserver --backend-directory=$T/backends "\$@"
SCRIPT
chmod +x "$DEST/tritonserver.new"
rm -rf "$DEST/wheel" "$T/python_backend_stubs"
mv "$DEST/tritonserver.new" "$DEST/tritonserver"
echo "$DEST/tritonserver"
