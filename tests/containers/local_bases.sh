#!/usr/bin/env bash
# Base images for `make test-containers` where no image registry can be reached, but Debian's packages can. As root:
#   tests/containers/local_bases.sh [--host-authorities]
#   make test-containers TRY="--python-image local/python:3.11 --image redis=local/redis:7 --image prometheus=local/prometheus:2 \
#     --skip grafana --torch-backend ''"
# DEBIAN_MIRROR names another mirror. --host-authorities puts this machine's certificate authorities into the images, for builds behind
# a proxy of its own; such images are for this machine only.
# WHEELS names a folder of wheels that builds prefer to the index's: torch for the CPU is 0.2 GB, the index's brings CUDA, several GB.
set -euo pipefail

missing=()
for tool in debootstrap docker; do command -v "$tool" >/dev/null || missing+=("$tool"); done
if [ "${#missing[@]}" -gt 0 ]; then
    echo "Not installed: ${missing[*]}; install them (Debian: apt-get install debootstrap docker.io)." >&2
    exit 2
fi
if [ "$(id -u)" -ne 0 ]; then
    echo "debootstrap needs root; run this as root." >&2
    exit 2
fi

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# make_image NAME PACKAGES PREPARE [CHANGES OF THE IMAGE ...]: PREPARE is a function that gets the root folder
make_image() {
    local name=$1 packages=$2 prepare=$3 root=$folder/root
    shift 3
    echo "making $name" >&2
    debootstrap --variant=minbase --include="ca-certificates,$packages" bookworm "$root" ${DEBIAN_MIRROR:+"$DEBIAN_MIRROR"} >&2
    if [ "${host_authorities:-}" ]; then
        cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
    fi
    "$prepare" "$root"
    tar -C "$root" -c . | docker import "$@" - "$name" >/dev/null
    rm -rf "$root"
}

# The Dockerfiles expect pip and a Python in /usr/local/bin, as Docker's own image has them.
for_python() {
    ln -s /usr/bin/python3 "$1/usr/local/bin/python3"
    ln -s /usr/bin/python3 "$1/usr/local/bin/python"
    mkdir "$1/opt/wheels"
    if [ "${WHEELS:-}" ]; then cp "$WHEELS"/*.whl "$1/opt/wheels/"; fi
}

for_redis() {
    install -d -o 999 -g 999 "$1/data"
}

# As Prometheus' own image has it.
for_prometheus() {
    install -d -o 65534 -g 65534 "$1/prometheus"
}

[ "${1:-}" = --host-authorities ] && host_authorities=1
bundle=/etc/ssl/certs/ca-certificates.crt
make_image local/python:3.11 python3,python3-pip,python3-venv for_python \
    -c "ENV PIP_BREAK_SYSTEM_PACKAGES=1 SSL_CERT_FILE=$bundle PIP_CERT=$bundle UV_FIND_LINKS=/opt/wheels"
make_image local/redis:7 redis-server for_redis -c "WORKDIR /data"
make_image local/prometheus:2 prometheus,wget for_prometheus -c "WORKDIR /prometheus" -c "USER 65534:65534" \
    -c 'ENTRYPOINT ["/usr/bin/prometheus"]'
