"""Reads what a browser shows of the server's page."""

import re

PHONE = {"viewport": {"width": 375, "height": 700}, "has_touch": True, "is_mobile": True}


def contrast(page, selector):
    """Returns the WCAG 2 contrast ratio of an element's text."""
    colors = page.locator(selector).first.evaluate(
        """e => {
          let ground = e;
          while (/, 0\\)|transparent/.test(getComputedStyle(ground).backgroundColor))
            ground = ground.parentElement;
          return [getComputedStyle(e).color, getComputedStyle(ground).backgroundColor];
        }"""
    )

    def luminance(color):
        values = [int(v) / 255 for v in re.findall(r"\d+", color)[:3]]
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
        return sum(w * v for w, v in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    high, low = sorted(map(luminance, colors), reverse=True)
    return (high + 0.05) / (low + 0.05)
