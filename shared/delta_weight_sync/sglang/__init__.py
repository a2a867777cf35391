"""The part of the library that runs inside SGLang, and brings versions into its live parameters."""
