"""Columns of FOCUS 1.2: facts of the published specification, tag v1.2.

https://github.com/FinOps-Open-Cost-and-Usage-Spec/FOCUS_Spec, specification/columns.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """A column. level: Mandatory, Recommended, Conditional.   values: allowed ones; None is any."""

    level: str
    is_nullable: bool
    type: str
    values: frozenset[str] | None = None


_VALUES = {
    "BillingCurrency": {"USD"},  # FOCUS allows any of ISO 4217; bills are in USD
    "ChargeCategory": {"Usage", "Purchase", "Tax", "Credit", "Adjustment"},
    "ChargeClass": {"Correction"},
    "ChargeFrequency": {"One-Time", "Recurring", "Usage-Based"},
    "PricingCategory": {"Standard", "Dynamic", "Committed", "Other"},
    "ServiceCategory": {
        "AI and Machine Learning", "Analytics", "Business Applications", "Compute", "Databases",
        "Developer Tools", "Multicloud", "Identity", "Integration", "Internet of Things",
        "Management and Governance", "Media", "Migration", "Mobile", "Networking", "Security",
        "Storage", "Web", "Other",
    },
    # Subcategories of "AI and Machine Learning".
    "ServiceSubcategory": {
        "AI Platforms", "Bots", "Generative AI", "Machine Learning",
        "Natural Language Processing", "Other (AI and Machine Learning)",
    },
}  # fmt: skip

# Each line: column, feature level, N if nulls are allowed, data type.
_COLUMNS = """
AvailabilityZone Recommended N String
BilledCost Mandatory - Decimal
BillingAccountId Mandatory - String
BillingAccountName Mandatory N String
BillingAccountType Conditional - String
BillingCurrency Mandatory - String
BillingPeriodEnd Mandatory - Date/Time
BillingPeriodStart Mandatory - Date/Time
CapacityReservationId Conditional N String
CapacityReservationStatus Conditional N String
ChargeCategory Mandatory - String
ChargeClass Mandatory N String
ChargeDescription Mandatory N String
ChargeFrequency Recommended - String
ChargePeriodEnd Mandatory - Date/Time
ChargePeriodStart Mandatory - Date/Time
CommitmentDiscountCategory Conditional N String
CommitmentDiscountId Conditional N String
CommitmentDiscountName Conditional N String
CommitmentDiscountQuantity Conditional N Decimal
CommitmentDiscountStatus Conditional N String
CommitmentDiscountType Conditional N String
CommitmentDiscountUnit Conditional N String
ConsumedQuantity Conditional N Decimal
ConsumedUnit Conditional N String
ContractedCost Mandatory - Decimal
ContractedUnitPrice Conditional N Decimal
EffectiveCost Mandatory - Decimal
InvoiceId Recommended N String
InvoiceIssuerName Mandatory - String
ListCost Mandatory - Decimal
ListUnitPrice Conditional N Decimal
PricingCategory Conditional N String
PricingCurrency Conditional N String
PricingCurrencyContractedUnitPrice Conditional N Decimal
PricingCurrencyEffectiveCost Conditional N Decimal
PricingCurrencyListUnitPrice Conditional N Decimal
PricingQuantity Mandatory N Decimal
PricingUnit Mandatory N String
ProviderName Mandatory - String
PublisherName Mandatory - String
RegionId Conditional N String
RegionName Conditional N String
ResourceId Conditional N String
ResourceName Conditional N String
ResourceType Conditional N String
ServiceCategory Mandatory - String
ServiceName Mandatory - String
ServiceSubcategory Recommended - String
SkuId Conditional N String
SkuMeter Conditional N String
SkuPriceDetails Conditional N JSON
SkuPriceId Conditional N String
SubAccountId Conditional N String
SubAccountName Conditional N String
SubAccountType Conditional N String
Tags Conditional N JSON
"""

COLUMNS = {
    name: Column(
        level,
        nullable == "N",
        type,
        frozenset(_VALUES[name]) if name in _VALUES else None,
    )
    for name, level, nullable, type in map(str.split, _COLUMNS.split("\n")[1:-1])
}

# Conditional columns that apply to a provider without regions, reservations, commitments, tags,
# currencies other than its billing currency, and several kinds of accounts.
OF_OURS = {
    "ConsumedQuantity", "ConsumedUnit", "ContractedUnitPrice", "ListUnitPrice", "ResourceId",
    "ResourceName", "ResourceType", "SkuId", "SkuMeter", "SkuPriceDetails", "SkuPriceId",
    "SubAccountId", "SubAccountName",
}  # fmt: skip

FORMATS = {
    # Numbers and exponents have no plus sign; separators and units are not allowed.
    "Decimal": re.compile(r"-?[0-9]+(\.[0-9]+)?(E-?[0-9]+)?"),
    "Date/Time": re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z"),
    "String": re.compile(r"(?s)(?! *\Z).+"),
    "JSON": re.compile(r"(?s)\{.*\}"),
}

UNITS = {"Tokens", "GB-Hours", "Units"}
"""Units that the exports use; the unit format's lists allow them."""
