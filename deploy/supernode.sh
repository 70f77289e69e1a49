#!/usr/bin/env bash
# Start a SuperNode, which trains on images of its own.
#
#     deploy/supernode.sh --superlink HOST:PORT --client-id ID --data-dir DIR [--memory-dir DIR]
#         [--ca FILE --key FILE] [OPTION OF flower-supernode...]
#
# --data-dir   parquet files, or one folder of images per class
# --client-id  a name that no other client has
# --memory-dir where the residual lies, so that it survives a restart (default: it is kept in memory)
# --ca, --key  the CA's certificate and this node's private key, for TLS
#
# A second SuperNode on one machine needs a --port of its own (default 9094).
set -euo pipefail

superlink="" client_id="" data_dir="" memory_dir="" ca="" key="" options=()
while [[ $# -gt 0 ]]; do
    case $1 in
        --superlink) superlink=$2 ;;
        --client-id) client_id=$2 ;;
        --data-dir) data_dir=$2 ;;
        --memory-dir) memory_dir=$2 ;;
        --ca) ca=$2 ;;
        --key) key=$2 ;;
        *) options+=("$1"); shift; continue ;;
    esac
    shift 2
done
if [[ -z $superlink || -z $client_id || ! -d $data_dir ]]; then
    echo "$0: --superlink, --client-id and --data-dir (a folder) must be given, got" \
        "'$superlink', '$client_id' and '$data_dir'" >&2
    exit 2
fi

security=(--insecure)
if [[ -n $ca ]]; then
    security=(--root-certificates "$ca")
fi
if [[ -n $key ]]; then
    security+=(--auth-supernode-private-key "$key")
fi

node="client-id=\"$client_id\" data-dir=\"$(realpath "$data_dir")\""
if [[ -n $memory_dir ]]; then
    node+=" memory-dir=\"$(realpath -m "$memory_dir")\""
fi

exec flower-supernode "${security[@]}" --superlink "$superlink" --node-config "$node" "${options[@]}"
