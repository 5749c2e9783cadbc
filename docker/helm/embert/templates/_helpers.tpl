{{/* Name of all objects: the release, and the chart where the release's name lacks it. A service's has no dots. */}}
{{- define "embert.fullname" -}}
{{- $name := printf "%s-%s" .Release.Name .Chart.Name -}}
{{- if contains .Chart.Name .Release.Name -}}{{- $name = .Release.Name -}}{{- end -}}
{{ .Values.fullnameOverride | default $name | replace "." "-" | trunc 52 | trimSuffix "-" }}
{{- end -}}

{{/* By which selectors know the pods of this release from those of another. */}}
{{- define "embert.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "embert.labels" -}}
{{ include "embert.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end -}}

{{- define "embert.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default (printf "%s%s" .Chart.AppVersion (ternary "" "-cpu" .Values.gpu.enabled)) }}
{{- end -}}

{{- define "embert.resources" -}}
{{- $gpu := dict "requests" (dict "cpu" "4" "memory" "4Gi") "limits" (dict "memory" "8Gi") -}}
{{- $cpu := dict "requests" (dict "cpu" "4" "memory" "2Gi") "limits" (dict "cpu" "4" "memory" "4Gi") -}}
{{- $resources := .Values.resources | default (ternary $gpu $cpu .Values.gpu.enabled) | deepCopy -}}
{{- if .Values.gpu.enabled -}}
{{- $count := dict .Values.gpu.resource .Values.gpu.count -}}
{{- $resources = mustMergeOverwrite $resources (dict "requests" $count "limits" $count) -}}
{{- end -}}
{{ toYaml $resources }}
{{- end -}}

{{/* Tokens that wait for a replica, on average, before there is another: a full batch. */}}
{{- define "embert.queueTokens" -}}
{{ .Values.autoscaling.queueTokens | default (ternary 16384 2048 .Values.gpu.enabled) | int64 }}
{{- end -}}

{{/* Null values of `rollout`, resolved. */}}
{{- define "embert.maxSurge" -}}
{{ kindIs "invalid" .Values.rollout.maxSurge | ternary (ternary 0 1 .Values.gpu.enabled) .Values.rollout.maxSurge }}
{{- end -}}
{{- define "embert.maxUnavailable" -}}
{{ kindIs "invalid" .Values.rollout.maxUnavailable | ternary (ternary 1 0 .Values.gpu.enabled) .Values.rollout.maxUnavailable }}
{{- end -}}

{{/* What values.schema.json cannot say, or not in a sentence. */}}
{{- define "embert.check" -}}
{{- with .Values.autoscaling -}}
{{- if gt (int .minReplicas) (int .maxReplicas) -}}
{{ fail (printf "autoscaling.minReplicas is %v, above autoscaling.maxReplicas, which is %v" .minReplicas .maxReplicas) }}
{{- end -}}
{{- end -}}
{{- $surge := include "embert.maxSurge" . -}}
{{- $unavailable := include "embert.maxUnavailable" . -}}
{{- if and (has $surge (list "0" "0%")) (has $unavailable (list "0" "0%")) -}}
{{ fail (printf "rollout.maxSurge is %s and rollout.maxUnavailable is %s: one of them must be above 0" $surge $unavailable) }}
{{- end -}}
{{- if .Values.options.EMBERT_SSL_CA_CERTS -}}
{{ fail "options.EMBERT_SSL_CA_CERTS cannot be set: the kubelet's probes have no client certificate; end TLS in front of the pods" }}
{{- end -}}
{{- $keyless := .Values.options.EMBERT_KEYLESS | default "" | toString -}}
{{- range .Values.extraEnv -}}
{{- if eq .name "EMBERT_KEYLESS" -}}{{- $keyless = .value | default "" | toString -}}{{- end -}}
{{- end -}}
{{- if has "none" (splitList "," (nospace $keyless)) -}}
{{ fail "EMBERT_KEYLESS is none: the kubelet's probes have no key; other values keep the probes open" }}
{{- end -}}
{{- if and .Values.model .Values.modelsFile -}}
{{ fail (printf "model is %s and modelsFile is set, too: the file lists the models" .Values.model) }}
{{- end -}}
{{- $set := dict "EMBERT_MODEL" "model" "EMBERT_CONFIG" "modelsFile" "EMBERT_DRAIN_TIMEOUT" "drainTimeout" "EMBERT_API_KEY" "apiKeys" "EMBERT_API_KEY_FILE" "apiKeys" "EMBERT_HOST" "" "EMBERT_PORT" "" "EMBERT_METRICS_PORT" "" -}}
{{- $known := splitList "\n" (.Files.Get "files/options.txt" | trim) -}}
{{- range $name, $_ := .Values.options -}}
{{- if not (has $name $known) -}}
{{ fail (printf "options.%s is not an option of embert serve%s" $name (include "embert.near" (dict "name" $name "known" $known))) }}
{{- end -}}
{{- if hasKey $set $name -}}
{{ fail (printf "options.%s cannot be set: %s" $name (get $set $name | empty | ternary "the chart decides it" (printf "use the value %s" (get $set $name)))) }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Of known names, the one that begins and ends most like a misspelt one. */}}
{{- define "embert.near" -}}
{{- $name := .name -}}
{{- $best := "" -}}
{{- $most := 0 -}}
{{- range $each := .known -}}
{{- $same := 0 -}}
{{- range $n := until (min (len $name) (len $each) | int) -}}
{{- if hasPrefix (substr 0 (add1 $n | int) $name) $each -}}{{- $same = add1 $same -}}{{- end -}}
{{- if hasSuffix (substr (int (sub (sub (len $name) $n) 1)) (len $name) $name) $each -}}{{- $same = add1 $same -}}{{- end -}}
{{- end -}}
{{- if gt $same $most -}}{{- $best = $each -}}{{- $most = $same -}}{{- end -}}
{{- end -}}
{{- if ge (mul 10 $most) (mul 7 (len $name)) }}; did you mean {{ $best }}?{{ end -}}
{{- end -}}

{{/* What probes ask with: TLS where the server has it. */}}
{{- define "embert.scheme" -}}
{{- if .Values.options.EMBERT_SSL_CERTFILE }}, scheme: HTTPS{{ end -}}
{{- end -}}

{{/* Ports of the collector, the hub's mirror and proxies, as far as options and extraEnv name them; not 443. */}}
{{- define "embert.egressPorts" -}}
{{- $urls := list (.Values.options.EMBERT_OTLP_ENDPOINT | default "") -}}
{{- range .Values.extraEnv -}}
{{- if has (upper .name) (list "HF_ENDPOINT" "OTEL_EXPORTER_OTLP_ENDPOINT" "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT" "HTTP_PROXY" "HTTPS_PROXY") -}}
{{- $urls = append $urls (.value | default "") -}}
{{- end -}}
{{- end -}}
{{- $ports := list -}}
{{- range compact $urls -}}
{{- $usual := ternary "443" "80" (hasPrefix "https:" .) -}}
{{- $ports = append $ports (regexFind ":[0-9]+$" (urlParse .).host | trimPrefix ":" | default $usual) -}}
{{- end -}}
{{- without (uniq $ports) "443" | join " " -}}
{{- end -}}

{{/* Up at once, down slowly: the same for both kinds of autoscaler. */}}
{{- define "embert.behavior" -}}
scaleUp:
  stabilizationWindowSeconds: 0
scaleDown:
  stabilizationWindowSeconds: 300
  policies:
    - {type: Pods, value: 1, periodSeconds: 60}
{{- end -}}
