//! Templates: partial specs below the words of a request.

use super::fields::*;
use super::spec::{BoxSpec, SpecDraft};
use crate::invalid::Invalid;

/// Fields that say who has a box, for how long, and what a call runs in it.
const OF_REQUEST: [&str; 13] = [
    "cmd",
    "workdir",
    "timeout_sec",
    "env",
    "persistent",
    "name",
    "labels",
    "note",
    "gateway",
    "lifetime",
    "template",
    "pool",
    // The runtime applies it when a request takes the box.
    "network_policy",
];

macro_rules! declare {
    ($(
        $(#[doc = $doc:literal])*
        $name:ident: $type:tt = $default:tt, $rule:expr $(, fixed $shown:ident)? $(, lockable $lock:ident)?;
    )*) => {
        /// Compares what a box is made of: two specs without the fields that can differ between
        /// a box of a pool and the request that takes it. Returns the first field that differs.
        pub fn first_difference(prepared: &BoxSpec, asked: &BoxSpec) -> Option<&'static str> {
            $(
                if !OF_REQUEST.contains(&stringify!($name))
                    && PartialEq::ne(&prepared.$name, &asked.$name)
                {
                    return Some(stringify!($name));
                }
            )*
            None
        }

        impl SpecDraft {
            /// Fills every unset field from a template.
            ///
            /// Labels and the variables of `defaults` are joined, and those of the request win.
            pub fn fill_from(&mut self, template: &Self) {
                if let (Some(own), Some(others)) = (&mut self.labels, &template.labels) {
                    for (label, value) in others {
                        own.entry(label.clone()).or_insert_with(|| value.clone());
                    }
                }
                if let (Some(own), Some(others)) = (&mut self.defaults, &template.defaults) {
                    own.fill_from(others.clone());
                }
                let (has_image, has_snapshot) = (self.image.is_some(), self.snapshot.is_some());
                $(
                    if self.$name.is_none() {
                        self.$name.clone_from(&template.$name);
                    }
                )*
                // A snapshot has its own image.
                match (has_image, has_snapshot) {
                    (false, true) => self.image = None,
                    (true, false) => self.snapshot = None,
                    _ => {}
                }
            }
        }
    };
}

spec_fields!(declare);

impl Defaults {
    /// Fills every unset member, and adds variables that this one does not set.
    fn fill_from(&mut self, others: Self) {
        let own = std::mem::replace(&mut self.env, others.env);
        self.env.extend(own);
        self.env_file = self.env_file.take().or(others.env_file);
        self.cwd = self.cwd.take().or(others.cwd);
        self.user = self.user.take().or(others.user);
        self.shell = self.shell.take().or(others.shell);
    }
}

impl SpecDraft {
    /// Checks the rules of a spec and of a template.
    pub fn check_template(&self) -> Result<(), Invalid> {
        let of_a_request = [
            ("box_id", self.box_id.is_some()),
            ("name", self.name.is_some()),
            ("cmd", self.cmd.is_some()),
            ("template", self.template.is_some()),
            ("pool", self.pool.is_some()),
        ];
        if let Some((field, _)) = of_a_request.into_iter().find(|(_, set)| *set) {
            let rule = "belongs to a request; a template cannot set it";
            return Err(Invalid::new(field, rule));
        }
        let complete = Self {
            box_id: Some("template".to_owned()),
            ..self.clone()
        };
        complete.build().map(drop)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, from_value, json, to_value};

    use super::*;

    fn draft(value: Value) -> SpecDraft {
        from_value(value).unwrap()
    }

    #[test]
    fn a_request_wins_over_its_template() {
        let template = draft(json!({"memory_mb": 256, "cpus": 2.0, "network": "on",
            "labels": {"team": "a", "of": "template"}, "dirs": ["/data"],
            "defaults": {"env": {"A": "1", "B": "2"}, "cwd": "/data"}}));
        let mut request = draft(
            json!({"box_id": "s", "memory_mb": 512, "labels": {"team": "b"},
            "defaults": {"env": {"B": "3"}, "shell": "/bin/sh"}}),
        );
        request.fill_from(&template);
        let expected = json!({"box_id": "s", "memory_mb": 512, "cpus": 2.0, "network": "on",
            "labels": {"team": "b", "of": "template"}, "dirs": ["/data"],
            "defaults": {"env": {"A": "1", "B": "3"}, "cwd": "/data", "shell": "/bin/sh"}});
        assert_eq!(to_value(&request).unwrap(), expected);
        let mut bare = SpecDraft::new("t");
        bare.fill_from(&template);
        assert_eq!(
            SpecDraft {
                box_id: None,
                ..bare
            },
            template
        );
    }

    #[test]
    fn a_prepared_box_fits_requests_that_differ_in_name_and_lifetime() {
        let spec = |value: Value| draft(value).build().unwrap();
        let prepared =
            spec(json!({"box_id": "p", "memory_mb": 64, "prepare": {"commands": [{"text": "a"}]}}));
        let asked = spec(
            json!({"box_id": "s", "memory_mb": 64, "prepare": {"commands": [{"text": "a"}]},
            "name": "n", "labels": {"a": "b"}, "lifetime": {"idle_ms": 5}, "pool": "p", "template": "t",
            "cmd": "ls", "timeout_sec": 5, "persistent": true}),
        );
        assert_eq!(first_difference(&prepared, &asked), None);
        for (other, field) in [
            (json!({"memory_mb": 65}), "memory_mb"),
            (json!({"defaults": {"env": {"A": "1"}}}), "defaults"),
            (json!({"prepare": {"commands": [{"text": "b"}]}}), "prepare"),
            (json!({"network": "on"}), "network"),
        ] {
            let mut value = to_value(SpecDraft::from(prepared.clone())).unwrap();
            value
                .as_object_mut()
                .unwrap()
                .extend(other.as_object().unwrap().clone());
            assert_eq!(first_difference(&prepared, &spec(value)), Some(field));
        }
    }

    #[test]
    fn a_template_follows_the_rules_of_a_spec() {
        assert_eq!(draft(json!({"memory_mb": 64})).check_template(), Ok(()));
        for (wrong, field) in [
            (json!({"box_id": "s"}), "box_id"),
            (json!({"name": "n"}), "name"),
            (json!({"cmd": "ls"}), "cmd"),
            (json!({"template": "t"}), "template"),
            (json!({"pool": "p"}), "pool"),
            (json!({"memory_mb": 3}), "memory_mb"),
        ] {
            assert_eq!(draft(wrong).check_template().unwrap_err().field(), field);
        }
    }
}
