"""Docker's HEALTHCHECK: ends with status 0 when /health returns 200. The image has no curl."""

import os
import ssl
import urllib.request

tls = bool(os.environ.get("EMBERT_SSL_CERTFILE"))
url = f"{'https' if tls else 'http'}://127.0.0.1:{os.environ.get('EMBERT_PORT') or '8080'}/health"
context = ssl._create_unverified_context() if tls else None  # noqa: S323 - we ask ourselves
urllib.request.urlopen(url, timeout=4, context=context)  # noqa: S310 - http or https, see above
