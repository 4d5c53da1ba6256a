"""A stand-in; see the package. What TRL before 1.10 imports."""


class StatelessProcessGroup:
    pass
