#!/usr/bin/env bash
# Make a certificate authority (CA) and the SuperLink's certificate.
#
#     deploy/make-certificates.sh DIR [NAME OR ADDRESS OF THE SUPERLINK...]
#
# DIR/ca.crt goes to every SuperNode and to whoever submits runs; server.key stays on the
# SuperLink's machine, ca.key in a safe place. localhost and 127.0.0.1 are always among the names.
set -euo pipefail

folder=${1:?the folder for the certificates must be given}
shift
umask 077
mkdir -p "$folder"
names="DNS:localhost,IP:127.0.0.1,IP:::1"
for name in "$@"; do
    if [[ $name =~ ^[0-9.]+$ || $name == *:* ]]; then names+=",IP:$name"; else names+=",DNS:$name"; fi
done

key=(-newkey ec -pkeyopt ec_paramgen_curve:secp384r1 -nodes)
openssl req -new -x509 "${key[@]}" -sha256 -days 365 -subj "/O=CO3 CA" \
    -addext "keyUsage=critical,keyCertSign,cRLSign" \
    -keyout "$folder/ca.key" -out "$folder/ca.crt"
openssl req -new "${key[@]}" -subj "/O=CO3/CN=${1:-localhost}" \
    -keyout "$folder/server.key" -out "$folder/server.csr"
openssl x509 -req -sha256 -days 365 -in "$folder/server.csr" \
    -CA "$folder/ca.crt" -CAkey "$folder/ca.key" -CAcreateserial -out "$folder/server.pem" \
    -extfile <(printf 'subjectAltName=%s\nextendedKeyUsage=serverAuth\n' "$names")
rm "$folder/server.csr"
chmod 644 "$folder/ca.crt"
