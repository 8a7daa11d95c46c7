"""Reads what a browser shows of the server's page."""

import re

FIX = "fix grammar: My sisters wants to buy some tools including saws, hmamers, and brushes."
PHONE = {"viewport": {"width": 375, "height": 700}, "has_touch": True, "is_mobile": True}


def finished(page):
    """Waits for both texts; returns the line that compares them."""
    page.locator("#verdict", has_text="passes").wait_for()
    return page.inner_text("#verdict")


def run(page, prompt=FIX):
    """Decodes a prompt with and without drafts; returns the comparing line."""
    page.fill("#prompt", prompt)
    page.click("#run")
    return finished(page)


def fits(page):
    """Returns whether the page is no wider than a phone's screen."""
    return page.evaluate("document.documentElement.scrollWidth") <= PHONE["viewport"]["width"]


def figure(page, panel, name):
    return float(page.inner_text(f"#{panel} [data-figure={name}]"))


def writers(page, panel):
    """Returns the origin of each token of a text."""
    tokens = page.locator(f"#{panel} .token").all()
    return [token.get_attribute("class").split()[1] for token in tokens]


def contrast(page, selector):
    """Returns the WCAG 2 contrast ratio of an element's text."""
    colours = page.locator(selector).first.evaluate(
        """e => {
          let ground = e;
          while (/, 0\\)|transparent/.test(getComputedStyle(ground).backgroundColor))
            ground = ground.parentElement;
          return [getComputedStyle(e).color, getComputedStyle(ground).backgroundColor];
        }"""
    )

    def luminance(colour):
        values = [int(v) / 255 for v in re.findall(r"\d+", colour)[:3]]
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
        return sum(w * v for w, v in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    high, low = sorted(map(luminance, colours), reverse=True)
    return (high + 0.05) / (low + 0.05)
