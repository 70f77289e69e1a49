#!/usr/bin/env bash
# Start a SuperLink, the server's process; the ServerApps of all runs start under it.
#
#     deploy/superlink.sh [--certificates DIR] [OPTION OF flower-superlink...]
#
# DIR is what deploy/make-certificates.sh made: TLS, and SuperNodes must be registered by key.
# Without it nothing is encrypted and everyone is let in: for one machine or a closed network.
set -euo pipefail

security=(--insecure)
if [[ ${1:-} == --certificates ]]; then
    folder=${2:?--certificates must be followed by a folder}
    shift 2
    security=(
        --ssl-ca-certfile "$folder/ca.crt"
        --ssl-certfile "$folder/server.pem"
        --ssl-keyfile "$folder/server.key"
        --enable-supernode-auth
    )
fi

# Else it would resolve and install the app's dependencies, torch among them, for every run.
exec flower-superlink "${security[@]}" --disable-runtime-dependency-installation "$@"
