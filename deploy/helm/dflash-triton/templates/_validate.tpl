{{/* A memory quantity in Mi, for comparisons. The schema allows Mi and Gi only. */}}
{{- define "dflash.mebibytes" -}}
{{- if hasSuffix "Gi" . -}}
{{- mulf (trimSuffix "Gi" . | float64) 1024.0 | int64 -}}
{{- else -}}
{{- trimSuffix "Mi" . | int64 -}}
{{- end -}}
{{- end -}}

{{/* Names of variables whose values belong into a Secret. */}}
{{- define "dflash.secretNames" -}}
TOKEN|SECRET|PASSWORD|API_KEY|ACCESS_KEY|_KEY$|_PASS$|CREDENTIALS|SAS_URL
{{- end -}}

{{/* Whether a variable of this name would hold a secret. Where to ask for a token is none; Azure's SAS URL is. */}}
{{- define "dflash.isSecret" -}}
{{- if and (regexMatch (include "dflash.secretNames" .) .) (or (hasSuffix "SAS_URL" .) (not (hasSuffix "_URL" .))) -}}
true
{{- end -}}
{{- end -}}

{{/* What a schema cannot say. Fails with one line each. */}}
{{- define "dflash.validate" -}}
{{- include "dflash.validatePublished" . -}}
{{- $values := .Values -}}
{{- $seen := dict -}}
{{- $claims := dict -}}
{{- $scaled := "" -}}
{{- range $pool := $values.pools -}}
  {{- if hasKey $seen $pool.name -}}
    {{- fail (printf "pools: two pools are named %s" $pool.name) -}}
  {{- end -}}
  {{- $_ := set $seen $pool.name true -}}
  {{- include "dflash.validateEngine" $pool -}}
  {{- with $pool.autoscaling -}}
    {{- $scaled = $pool.name -}}
    {{- if gt (int .minReplicas) (int .maxReplicas) -}}
      {{- fail (printf "pools: %s has autoscaling.minReplicas above maxReplicas" $pool.name) -}}
    {{- end -}}
  {{- end -}}
  {{- $limit := dig "limits" "memory" "" ($pool.resources | default dict) -}}
  {{- if and $limit (le (include "dflash.mebibytes" $limit | int64) (include "dflash.mebibytes" $values.shm.sizeLimit | int64)) -}}
    {{- fail (printf "pools: %s has a memory limit of %s, and /dev/shm alone may take %s of it" $pool.name $limit $values.shm.sizeLimit) -}}
  {{- end -}}
  {{- $claim := dig "pvc" "claim" "" $pool.engine | default (dig "build" "claim" "" $pool.engine) -}}
  {{- $mode := include "dflash.accessMode" (dict "root" $ "pool" $pool) -}}
  {{- if and $pool.engine.build $values.build.hook (not $claim) -}}
    {{- fail (printf "build.hook: the Job of pool %s runs before the chart can make a claim: name one in engine.build.claim" $pool.name) -}}
  {{- end -}}
  {{- if and $pool.engine.build (gt (int $pool.gpus) 0) -}}
    {{- if not (regexMatch "(^| )--device[ =]" (printf "%s " (join " " ($pool.engine.build.args | default list)))) -}}
      {{- fail (printf "pools: %s has GPUs, and its engine would be built for the CPU: add --device to engine.build.args, e.g. [--device, sm90]" $pool.name) -}}
    {{- end -}}
  {{- end -}}
  {{- if eq $mode "ReadWriteOnce" -}}
    {{- $most := max (dig "replicas" 1 $pool) (dig "autoscaling" "maxReplicas" 0 $pool) -}}
    {{- if gt $most 1 -}}
      {{- fail (printf "pools: %s may have %d replicas, and its engine's volume is ReadWriteOnce: use a claim that is ReadOnlyMany or ReadWriteMany" $pool.name $most) -}}
    {{- end -}}
    {{- if hasKey $claims $claim -}}
      {{- fail (printf "pools: %s and %s share the claim %s, which is ReadWriteOnce" (get $claims $claim) $pool.name $claim) -}}
    {{- end -}}
  {{- end -}}
  {{- if $claim -}}
    {{- $_ := set $claims $claim $pool.name -}}
  {{- end -}}
{{- end -}}
{{- range $values.extraEnv -}}
  {{- if and (hasKey . "value") (include "dflash.isSecret" .name) -}}
    {{- fail (printf "extraEnv: %s is named like a secret and has a plain value: use valueFrom.secretKeyRef" .name) -}}
  {{- end -}}
{{- end -}}
{{- if and (ne $values.autoscaling.kind "none") (not $scaled) -}}
  {{- fail (printf "autoscaling.kind is %s, and no pool has autoscaling.minReplicas and maxReplicas" $values.autoscaling.kind) -}}
{{- end -}}
{{- if and (eq $values.autoscaling.kind "none") $scaled -}}
  {{- fail (printf "pools: %s has autoscaling, and autoscaling.kind is none: set replicas, or a kind" $scaled) -}}
{{- end -}}
{{- if and $values.serviceAccount.annotations (not $values.serviceAccount.create) -}}
  {{- fail "serviceAccount: annotations are for an account that the chart makes, and create is false" -}}
{{- end -}}
{{- end -}}

{{/* Takes one entry of .Values.pools. */}}
{{- define "dflash.validateEngine" -}}
{{- $pool := . -}}
{{- if and .gpuResource (not .gpus) (not (dig "build" "gpus" 0 .engine)) -}}
  {{- fail (printf "pools: %s has a gpuResource, and gpus is 0" .name) -}}
{{- end -}}
{{- with .engine.objectStore -}}
  {{- range $name, $_ := .env -}}
    {{- if include "dflash.isSecret" $name -}}
      {{- fail (printf "pools: %s has %s in engine.objectStore.env, which is named like a secret: put it into engine.objectStore.secret" $pool.name $name) -}}
    {{- end -}}
  {{- end -}}
  {{- /* "store,env_auth=true:bucket/path" adds to a remote, ":s3,env_auth:bucket/path" says all by itself. */}}
  {{- $remote := first (splitList ":" .source) | splitList "," | first -}}
  {{- $type := printf "RCLONE_CONFIG_%s_TYPE" (upper $remote) -}}
  {{- if and $remote (not .secret) (not (hasKey (.env | default dict) $type)) -}}
    {{- fail (printf "pools: %s copies its engine from the remote %s, which nothing describes: set %s in engine.objectStore.env, or name a secret" $pool.name $remote $type) -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{/* Whoever asks for a way in gets one that leads somewhere. */}}
{{- define "dflash.validatePublished" -}}
{{- $openai := .Values.server.openai.enabled -}}
{{- if and .Values.ingress.enabled (not (or $openai .Values.ingress.triton)) -}}
  {{- fail "ingress: there is nothing to route to: set server.openai.enabled or ingress.triton" -}}
{{- end -}}
{{- if and .Values.gateway.enabled (not (or $openai .Values.gateway.triton .Values.gateway.grpc.enabled)) -}}
  {{- fail "gateway: there is nothing to route to: set server.openai.enabled, gateway.triton or gateway.grpc.enabled" -}}
{{- end -}}
{{- with .Values.gateway -}}
  {{- if and .enabled .grpc.hostnames (not .grpc.enabled) -}}
    {{- fail "gateway: grpc.hostnames are of a GRPCRoute, which is made only with gateway.grpc.enabled: true" -}}
  {{- end -}}
  {{- if and .enabled .hostnames (not (or $openai .triton)) -}}
    {{- fail "gateway: hostnames are of the HTTPRoute, and there is none without server.openai.enabled or gateway.triton" -}}
  {{- end -}}
{{- end -}}
{{- if and (ne .Values.service.type "ClusterIP") (not (or $openai .Values.service.triton)) -}}
  {{- fail (printf "service: a %s would have no ports: set server.openai.enabled or service.triton" .Values.service.type) -}}
{{- end -}}
{{- end -}}
