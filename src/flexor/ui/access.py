"""Who may use the application: who has the token of the link, from a page of the application itself."""

from __future__ import annotations

import hashlib
import hmac
from http.cookies import CookieError, SimpleCookie

from websockets.datastructures import Headers

from flexor.serve.access import foreign_name, is_foreign_page, names_of_server

NAMES = names_of_server("127.0.0.1", ())


class Access:
    """The token is in the link, and from then on in a cookie, which pages of other sites can't send."""

    def __init__(self, token: str):
        self.token = token
        # two applications on one machine, or behind two tunnels, must not take each other's cookie
        self.cookie = f"flexor-{hashlib.sha256(token.encode()).hexdigest()[:12]}"

    def set_cookie(self) -> str:
        return f"{self.cookie}={self.token}; HttpOnly; SameSite=Strict; Path=/"

    def in_link(self, query: dict[str, str]) -> bool:
        return self._is_token(query.get("token", ""))

    def refusal(self, headers: Headers, query: dict[str, str], writes: bool) -> tuple[int, str] | None:
        """The status and the reason, if a request is refused."""
        name = foreign_name(headers, NAMES)
        if name is not None:
            return 403, f"This application is not called {name!r}. Open it as http://127.0.0.1:PORT."
        if is_foreign_page(headers):
            return 403, "Pages of other sites can't use this application."
        if not (self.in_link(query) or self._is_token(self._cookie(headers))):
            return 401, "Open the link that `flexor ui` printed: it has a token in it."
        if writes and headers.get("Content-Type") != "application/json":
            return 415, "Send JSON."
        return None

    def _cookie(self, headers: Headers) -> str:
        try:
            cookies = SimpleCookie("; ".join(headers.get_all("Cookie")))
        except CookieError:
            return ""
        return cookies[self.cookie].value if self.cookie in cookies else ""

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(errors="replace"), self.token.encode())
