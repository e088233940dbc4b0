{{/* Names. 31 characters leave room for pool, "build" and a hash in the 63 of a Job. */}}
{{- define "dflash.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 31 | trimSuffix "-" -}}
{{- end -}}

{{- define "dflash.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 31 | trimSuffix "-" -}}
{{- else if contains (include "dflash.name" .) .Release.Name -}}
{{- .Release.Name | trunc 31 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "dflash.name" .) | trunc 31 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "dflash.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (ternary (include "dflash.fullname" .) "default" .Values.serviceAccount.create) -}}
{{- end -}}

{{- define "dflash.selectorLabels" -}}
app.kubernetes.io/name: {{ include "dflash.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "dflash.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "dflash.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{/* The server pods of a release. */}}
{{- define "dflash.serverLabels" -}}
{{ include "dflash.selectorLabels" . }}
app.kubernetes.io/component: server
{{- end -}}

{{/* Everything below takes a dict: root is the chart's context, pool one entry of .Values.pools. */}}

{{- define "dflash.poolName" -}}
{{ include "dflash.fullname" .root }}-{{ .pool.name }}
{{- end -}}

{{- define "dflash.poolLabels" -}}
{{ include "dflash.serverLabels" .root }}
dflash-trt/pool: {{ .pool.name }}
{{- end -}}

{{/* root, image. */}}
{{- define "dflash.image" -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ .image.tag | default .root.Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{/* What a built engine depends on: whatever changes here is another engine in another folder. */}}
{{- define "dflash.engineHash" -}}
{{- $build := .pool.engine.build -}}
{{- $image := include "dflash.image" (dict "root" .root "image" .root.Values.buildImage) -}}
{{- $gpu := list .pool.gpus (.pool.gpuResource | default "") (.pool.nodeSelector | default dict) -}}
{{- list $image $build.target ($build.drafter | default "") ($build.args | default list) $gpu | toJson | sha256sum | trunc 8 -}}
{{- end -}}

{{- define "dflash.cacheClaim" -}}
{{- .pool.engine.build.claim | default (printf "%s-engines" (include "dflash.poolName" .)) -}}
{{- end -}}

{{/* The engine directory in the container. */}}
{{- define "dflash.enginePath" -}}
{{- if .pool.engine.build -}}
/engines/{{ .pool.name }}-{{ include "dflash.engineHash" . }}
{{- else if .pool.engine.objectStore -}}
/engines/engine
{{- else -}}
{{ printf "/engines/%s" .pool.engine.pvc.path | trimSuffix "/" }}
{{- end -}}
{{- end -}}

{{/* The volume that holds engines. */}}
{{- define "dflash.engineVolume" -}}
name: engines
{{- if .pool.engine.objectStore }}
emptyDir:
  sizeLimit: {{ .pool.engine.objectStore.sizeLimit }}
{{- else if .pool.engine.build }}
persistentVolumeClaim:
  claimName: {{ include "dflash.cacheClaim" . }}
{{- else }}
persistentVolumeClaim:
  claimName: {{ .pool.engine.pvc.claim }}
  readOnly: true
{{- end }}
{{- end -}}

{{/* How the volume of a pool's engine may be mounted; empty for a copy of the pod's own. */}}
{{- define "dflash.accessMode" -}}
{{- if .pool.engine.pvc -}}
{{ .pool.engine.pvc.accessMode | default "ReadOnlyMany" }}
{{- else if .pool.engine.build -}}
{{ .root.Values.build.cache.accessMode }}
{{- end -}}
{{- end -}}

{{/* Where pods of a pool may run: servers and build Job alike, since an engine belongs to a GPU. */}}
{{- define "dflash.placement" -}}
{{- with .pool.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .pool.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if hasKey .pool "tolerations" }}
{{- with .pool.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- else if .pool.gpus }}
tolerations:
  - {key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}
{{- end }}
{{- $affinity := deepCopy (.pool.affinity | default dict) }}
{{- if eq (include "dflash.accessMode" .) "ReadWriteOnce" }}
{{- /* The volume is on one node: a server that waits for its engine must not hold it elsewhere. */}}
{{- $labels := merge (dict "dflash-trt/pool" .pool.name) (include "dflash.selectorLabels" .root | fromYaml) }}
{{- $together := dict "topologyKey" "kubernetes.io/hostname" "labelSelector" (dict "matchLabels" $labels) }}
{{- $affinity = merge $affinity (dict "podAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (list $together))) }}
{{- end }}
{{- with $affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* What every pod has: security, pull secrets. Takes the chart's context. */}}
{{- define "dflash.podSecurity" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- toYaml .Values.podSecurityContext | nindent 2 }}
{{- end -}}

{{/* pool, gpus, resources: those of a container, with the pool's kind of GPU. */}}
{{- define "dflash.resources" -}}
{{- $resources := deepCopy (.resources | default dict) -}}
{{- if .gpus -}}
{{- $gpu := dict (.pool.gpuResource | default "nvidia.com/gpu") 1 -}}
{{- $_ := set $resources "limits" (merge (dict) $gpu ($resources.limits | default dict)) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* Homes of what libraries write, nothing fetched at run time, and nothing reported. Takes online (bool) and gpus. */}}
{{- define "dflash.writableEnv" -}}
- {name: HOME, value: /cache}
- {name: XDG_CACHE_HOME, value: /cache}
- {name: HF_HOME, value: /cache/huggingface}
- {name: TMPDIR, value: /tmp}
- {name: ORT_DISABLE_TELEMETRY, value: "1"}
{{- if not .online }}
- {name: HF_HUB_OFFLINE, value: "1"}
{{- end }}
{{- if not .gpus }}
- {name: NVIDIA_VISIBLE_DEVICES, value: void}  # else a node's GPUs show up uninvited
{{- end }}
{{- end -}}

{{/* A memory quantity in Mi, for comparisons. The schema allows Mi and Gi only. */}}
{{- define "dflash.mebibytes" -}}
{{- if hasSuffix "Gi" . -}}
{{- mulf (trimSuffix "Gi" . | float64) 1024.0 | int64 -}}
{{- else -}}
{{- trimSuffix "Mi" . | int64 -}}
{{- end -}}
{{- end -}}

{{/* What a schema cannot say. Fails with one line each. */}}
{{- define "dflash.validate" -}}
{{- $values := .Values -}}
{{- $seen := dict -}}
{{- $claims := dict -}}
{{- $scaled := false -}}
{{- range $pool := $values.pools -}}
  {{- if hasKey $seen $pool.name -}}
    {{- fail (printf "pools: two pools are named %s" $pool.name) -}}
  {{- end -}}
  {{- $_ := set $seen $pool.name true -}}
  {{- with $pool.autoscaling -}}
    {{- $scaled = true -}}
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
  {{- if and (hasKey . "value") (regexMatch "TOKEN|SECRET|PASSWORD|API_KEY|ACCESS_KEY" .name) -}}
    {{- fail (printf "extraEnv: %s is named like a secret and has a plain value: use valueFrom.secretKeyRef" .name) -}}
  {{- end -}}
{{- end -}}
{{- if and (ne $values.autoscaling.kind "none") (not $scaled) -}}
  {{- fail (printf "autoscaling.kind is %s, and no pool has autoscaling.minReplicas and maxReplicas" $values.autoscaling.kind) -}}
{{- end -}}
{{- end -}}
