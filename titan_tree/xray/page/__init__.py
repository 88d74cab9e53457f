"""The X-ray page: ``render.write_page`` puts a payload, the code and the styles into one HTML file."""
