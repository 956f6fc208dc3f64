# SPDX-License-Identifier: Apache-2.0
"""A look into a buffer, saved or in use: numbers, text, pictures and one HTML page. Builds no buffer from a save."""
