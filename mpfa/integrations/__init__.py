# SPDX-License-Identifier: Apache-2.0
"""mpfa under other libraries' models. Each module imports the library it integrates with."""
