{{/* Init containers that bring the engine, and the build Job's script. All take root and pool. */}}

{{/* Waits, and never fails: a failed build shows as a failed Job, not as a server that restarts. */}}
{{- define "dflash.waitForEngine" -}}
- name: wait-for-engine
  image: {{ include "dflash.image" (dict "root" .root "image" .root.Values.image) | quote }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [sh, -c]
  args:
    - |
      trap 'exit 143' TERM
      until [ -f "$ENGINE/config.json" ]; do
        echo "waiting for $ENGINE; its build: kubectl logs -l $BUILD"
        sleep 10 & wait $!
      done
  env:
    - {name: ENGINE, value: {{ include "dflash.enginePath" . | quote }}}
    - {name: BUILD, value: {{ include "dflash.buildSelector" . | quote }}}
    - {name: NVIDIA_VISIBLE_DEVICES, value: void}
  resources:
    requests: {cpu: 10m, memory: 16Mi}
    limits: {memory: 64Mi}
  securityContext:
    {{- toYaml .root.Values.containerSecurityContext | nindent 4 }}
  volumeMounts:
    - {name: engines, mountPath: /engines, readOnly: true}
{{- end -}}

{{/* What was copied in part is copied again: the sums in the engine's manifest are the server's to check. */}}
{{- define "dflash.fetchEngine" -}}
{{- with .pool.engine.objectStore }}
- name: fetch-engine
  image: {{ include "dflash.image" (dict "root" $.root "image" $.root.Values.fetchImage) | quote }}
  imagePullPolicy: {{ $.root.Values.fetchImage.pullPolicy }}
  command: [rclone]
  args: [sync, {{ .source | quote }}, /engines/engine, --config=/tmp/rclone.conf, --stats=30s, --stats-one-line, --log-level=INFO]
  env:
    - {name: HOME, value: /tmp}
    {{- range $name, $value := .env }}
    - {name: {{ $name | quote }}, value: {{ $value | quote }}}
    {{- end }}
  {{- with .secret }}
  envFrom:
    - secretRef: {name: {{ . | quote }}}
  {{- end }}
  resources:
    requests: {cpu: 500m, memory: 256Mi}
    limits: {memory: 1Gi}
  securityContext:
    {{- toYaml $.root.Values.containerSecurityContext | nindent 4 }}
  volumeMounts:
    - {name: engines, mountPath: /engines}
    - {name: tmp, mountPath: /tmp}
{{- end }}
{{- end -}}

{{/* The lock makes a second pod of the Job, or another release on the claim, wait and then find the engine. */}}
{{- define "dflash.buildScript" -}}
set -eu
exec 9>"$ENGINE.lock"
flock 9
if [ -f "$ENGINE/config.json" ]; then
  echo "$ENGINE is there"
  exit 0
fi
exec dflash-trt build --output "$ENGINE" "$@"
{{- end -}}

{{/* Selects the pods of a pool's build Job, in kubectl's form. */}}
{{- define "dflash.buildSelector" -}}
app.kubernetes.io/instance={{ .root.Release.Name }},app.kubernetes.io/component=build,dflash-trt/pool={{ .pool.name }}
{{- end -}}
