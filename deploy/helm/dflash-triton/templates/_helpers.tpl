{{/* A text from values goes through `quote`: "123", "true" and "::" are no texts in YAML else. A number goes
through `int64`: Helm writes a large one as 1e+06 else. */}}

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
app.kubernetes.io/name: {{ include "dflash.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
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
dflash-trt/pool: {{ .pool.name | quote }}
{{- end -}}

{{/* Selects what Prometheus knows of the pods of some pools. Takes root and pools. A pod is named
POOL-REPLICASET-ID; a pool h100 must not count the pods of h100-mig. */}}
{{- define "dflash.selector" -}}
{{- $names := list -}}
{{- range .pools -}}
{{- $names = append $names .name -}}
{{- end -}}
namespace="{{ .root.Release.Namespace }}",pod=~"{{ include "dflash.fullname" .root }}-({{ join "|" $names }})-[^-]+-[^-]+"
{{- end -}}

{{/* What of Triton's gRPC service routes lead to: not its repository, shared-memory, trace and log settings,
which are methods of the same service. */}}
{{- define "dflash.grpcMethods" -}}
[ServerLive, ServerReady, ServerMetadata, ModelReady, ModelMetadata, ModelConfig, ModelInfer, ModelStreamInfer]
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
  claimName: {{ include "dflash.cacheClaim" . | quote }}
{{- else }}
persistentVolumeClaim:
  claimName: {{ .pool.engine.pvc.claim | quote }}
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
runtimeClassName: {{ . | quote }}
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
