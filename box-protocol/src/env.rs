//! Environment variables: checked names, hidden values.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Deref;

use serde::{Deserialize, Serialize};

use crate::invalid::Invalid;

/// Environment variables by name. [`Debug`](fmt::Debug) shows names only: values may be secret.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "BTreeMap<String, String>")]
pub struct Env(BTreeMap<String, String>);

impl Env {
    /// None at all.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds or replaces one variable.
    pub fn insert(
        &mut self,
        name: impl Into<String>,
        value: impl Into<String>,
    ) -> Result<(), Invalid> {
        let (name, value) = (name.into(), value.into());
        check(&name, &value)?;
        self.0.insert(name, value);
        Ok(())
    }

    /// Takes over all variables of `other`, which win over those already here.
    pub fn extend(&mut self, other: Self) {
        self.0.extend(other.0);
    }

    /// The names, sorted.
    pub fn names(&self) -> Vec<String> {
        self.0.keys().cloned().collect()
    }

    /// The variables as a plain map.
    pub fn into_map(self) -> BTreeMap<String, String> {
        self.0
    }
}

fn check(name: &str, value: &str) -> Result<(), Invalid> {
    if name.is_empty() || name.contains(['=', '\0']) {
        return Err(Invalid::new(
            "env",
            "must have names that are not empty and contain no = and no NUL",
        ));
    }
    if value.contains('\0') {
        return Err(Invalid::new("env", "must have values without NUL"));
    }
    Ok(())
}

impl TryFrom<BTreeMap<String, String>> for Env {
    type Error = Invalid;

    fn try_from(map: BTreeMap<String, String>) -> Result<Self, Invalid> {
        for (name, value) in &map {
            check(name, value)?;
        }
        Ok(Self(map))
    }
}

impl Deref for Env {
    type Target = BTreeMap<String, String>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl fmt::Debug for Env {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_stay_out_of_debug() {
        let mut env = Env::new();
        env.insert("TOKEN", "hunter2").unwrap();
        assert_eq!(format!("{env:?}"), r#"{"TOKEN"}"#);
    }

    #[test]
    fn rules_hold_on_construction_and_on_decode() {
        for (name, value) in [("", "v"), ("A=B", "v"), ("A\0", "v"), ("A", "v\0")] {
            assert_eq!(Env::new().insert(name, value).unwrap_err().field(), "env");
            let json = serde_json::json!({ name: value }).to_string();
            let error = serde_json::from_str::<Env>(&json).unwrap_err();
            assert_eq!(Invalid::from(error).field(), "env");
        }
        let env: Env = serde_json::from_str(r#"{"B":"=","A":""}"#).unwrap();
        assert_eq!(env.names(), ["A", "B"]);
    }

    #[test]
    fn later_variables_win() {
        let mut env: Env = serde_json::from_str(r#"{"A":"1","B":"1"}"#).unwrap();
        env.extend(serde_json::from_str(r#"{"B":"2"}"#).unwrap());
        assert_eq!((env["A"].as_str(), env["B"].as_str()), ("1", "2"));
    }
}
