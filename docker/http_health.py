"""Exit code 0 when the orchestrator of this container says that it is healthy; images have no curl.

Reads ECOSPEC_PORT (default 8000) and ECOSPEC_TLS_CERTIFICATE as the server does. A server that is loading, draining or dead answers
503, which is code 1.
"""

from __future__ import annotations

import http.client
import os
import ssl
import sys
import urllib.error
import urllib.request

TIMEOUT_SECONDS = 5.0


def main() -> int:
    scheme, context = "http", None
    if os.environ.get("ECOSPEC_TLS_CERTIFICATE"):
        # Nobody is between this process and its own machine, and the certificate does not name 127.0.0.1.
        scheme, context = "https", ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    url = f"{scheme}://127.0.0.1:{os.environ.get('ECOSPEC_PORT', '8000')}/health"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS, context=context):
            return 0
    except urllib.error.HTTPError as error:
        print(f"{url} answers {error.code}: {error.read(200).decode(errors='replace')}", file=sys.stderr)
    except (OSError, ValueError, http.client.HTTPException) as error:
        print(f"{url} cannot be asked: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
