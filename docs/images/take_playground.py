"""Takes playground.png again, of a running demo on an idle machine: `.venv/bin/python docs/images/take_playground.py [URL]`."""

from __future__ import annotations

import sys
from pathlib import Path

from playwright.sync_api import expect, sync_playwright

PICTURE = Path(__file__).with_name("playground.png")
SECONDS = 300
# In each run the step that brought the most tokens, the first of equals.
SHOW_BEST_STEPS = """() => {
  for (const answer of document.querySelectorAll('.answer')) {
    const steps = [...answer.querySelectorAll('.step')];
    const most = Math.max(...steps.map((step) => step.children.length));
    steps.find((step) => step.children.length === most).firstElementChild.click();
  }
  document.activeElement.blur();
}"""


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
        page.goto(url)
        expect(page.locator("#server")).to_have_text("Ready", timeout=1000 * SECONDS)
        page.get_by_label("Policy", exact=True).select_option("goodput")
        page.get_by_label("Compare with").select_option("likelihood")
        page.get_by_label("Tokens at most").fill("48")
        page.get_by_role("button", name="Ask").click()
        expect(page.locator("#comparison")).to_be_visible(timeout=1000 * SECONDS)
        page.evaluate(SHOW_BEST_STEPS)
        page.wait_for_timeout(500)  # the pictures are drawn in the next frame
        page.screenshot(path=PICTURE, full_page=True)
        browser.close()
    print(f"{PICTURE}: {PICTURE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
